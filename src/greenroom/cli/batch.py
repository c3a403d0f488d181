"""`greenroom batch MODEL FILE`: answers the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, add_verbose, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.serve import name_of, need_extra
from greenroom.cli.terminal.progress import Progress, collect_garbage, model_progress, quiet
from greenroom.config import LoadConfig, ServeConfig
from greenroom.errors import GreenroomError, UsageError
from greenroom.hf.checkpoint.names import check_name

if TYPE_CHECKING:
    from greenroom.server.batch.requests import BatchRequest
    from greenroom.server.batch.results import Results

BATCH = 64  # answers at the same time
CHUNK = 512  # nobody waits for a first token, so prompts are computed in large chunks
OPTIONS = (
    "model_name", "max_batch", "max_tokens", "speculate", "batch_invariant", "kv_memory",
    "prefix_share", "no_prefix_reuse", "prefill_chunk",
)  # fmt: skip
FOREVER_S = 1e7  # a request waits for its place as long as it must
HELP = "answer all requests of a file in OpenAI's batch format, many at a time"


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "file", metavar="FILE", type=Path,
        help="requests, one JSON object a line: custom_id, url (as /v1/chat/completions), body",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=True,
        help="answers, one JSON object a line; if the file exists, only missing ones are computed",
    )  # fmt: skip
    add_options(
        parser, ServeConfig, "batch", OPTIONS,
        {
            "max_batch": f"most requests that are answered at the same time (default: {BATCH})",
            "prefill_chunk": "prompt tokens that one forward pass computes while other answers are"
            f" generated (default: {CHUNK})",
        },
    )  # fmt: skip
    parser.set_defaults(max_batch=BATCH, prefill_chunk=CHUNK)
    add_verbose(parser)
    add_options(parser, LoadConfig)
    parser.show("out")


def main(args: argparse.Namespace) -> None:
    load, config = take(args, LoadConfig), take(args, ServeConfig)
    config.check_drafts()
    check_early(load)
    check_name(args.model)
    need_extra("batch")
    name = config.model_name or name_of(args.model)

    from greenroom.server.batch.requests import read_requests
    from greenroom.server.batch.results import Results

    if args.out.exists() and args.file.exists() and args.out.samefile(args.file):
        raise UsageError(f"{args.out} has the requests: give another file with --out")
    requests = read_requests(args.file, name)
    with Results(args.out, requests) as results:
        before = len(results.done)
        if before == len(requests):
            print(f"all {before:,} requests have their answers in {args.out}")
            return
        config = replace(config, max_queue=config.max_batch, timeout=FOREVER_S, no_page=True)
        _answer(args, load, config, name, requests, results)


def _answer(
    args: argparse.Namespace,
    load: LoadConfig,
    config: ServeConfig,
    name: str,
    requests: Sequence[BatchRequest],
    results: Results,
) -> None:
    """Load the model, answer the requests that have no result, and print what was done."""
    import asyncio

    from greenroom.server.batch.run import BatchRun, Tally
    from greenroom.server.chat.local import wait_until_loaded
    from greenroom.server.engine.start import start
    from greenroom.server.http.service import Service

    before, tally = len(results.done), Tally()
    with model_progress(args.model) as progress:
        quiet(progress)
        engine = start(args.model, load, config, verbose=args.verbose)
        service = Service(engine, config, name, log=tally)
        try:
            wait_until_loaded(
                engine, lambda share: progress.say(f"{args.model}: loading", share, 1)
            )
            progress.clear()
            tally.log_message(engine.summary)
            collect_garbage()
            run = BatchRun(service, results, lambda: _show(progress, results, len(requests)))
            begin = time.monotonic()
            asyncio.run(run.run(args.file, requests))
            seconds = time.monotonic() - begin
        finally:
            engine.stop(0.0)
            service.close()
    print(
        f"{len(results.done):,} of {len(requests):,} requests have answers in {args.out}"
        f"{f' ({before:,} from before)' if before else ''}; {seconds:.1f} s,"
        f" {tally.prompt_tokens:,} tokens of prompts ({tally.reused_tokens:,} reused),"
        f" {tally.new_tokens:,} of answers: {tally.new_tokens / seconds:.1f} tokens/s"
    )
    if run.refused:
        print(f"{run.refused:,} of them were refused: their lines have the reason")
    if run.failed:
        name, why = run.failed[0]
        raise GreenroomError(
            f"{len(run.failed):,} requests failed, which the same command tries again;"
            f" {name!r}: {why}"
        )


def _show(progress: Progress, results: Results, requests: int) -> None:
    progress.say("answering", len(results.done), requests)
