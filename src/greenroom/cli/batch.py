"""`greenroom batch MODEL FILE`: answers the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import MODEL, add_options, add_verbose, configured, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.serve import name_of, need_extra
from greenroom.cli.terminal.progress import Progress, collect_garbage, model_progress, quiet
from greenroom.config import LoadConfig, ServeConfig, flag
from greenroom.config.values import adapter_names
from greenroom.errors import GreenroomError, UsageError
from greenroom.hf.checkpoint.names import check_name

if TYPE_CHECKING:
    from greenroom.server.batch.requests import BatchRequest
    from greenroom.server.batch.results import Results
    from greenroom.server.batch.run import Answerer

BATCH = 64  # answers at the same time
CHUNK = 512  # nobody waits for a first token, so prompts are computed in large chunks
OPTIONS = (
    "model_name", "max_batch", "max_tokens", "speculate", "batch_invariant", "kv_memory",
    "prefix_share", "no_prefix_reuse", "prefill_chunk",
)  # fmt: skip
FOREVER_S = 1e7  # a request waits for its place as long as it must
HELP = "answer all requests of a file in OpenAI's batch format, many at a time"


def add_to(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}; with --url: its name there")
    parser.add_argument(
        "file", metavar="FILE", type=Path,
        help="requests, one JSON object a line: custom_id, url (as /v1/chat/completions), body",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=True,
        help="answers, one JSON object a line; if the file exists, only missing ones are computed",
    )  # fmt: skip
    parser.add_argument(
        "--url", metavar="URL",
        help="send the requests to the server at this address, in place of loading the model",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-file", metavar="FILE",
        help="with --url, file whose first line is the server's API key; the environment variable"
        " GREENROOM_API_KEY does the same",
    )  # fmt: skip
    add_options(
        parser, ServeConfig, "batch", OPTIONS,
        {
            "max_batch": f"most requests that are answered at the same time (default: {BATCH})",
            "prefill_chunk": "prompt tokens that one forward pass computes while other answers are"
            f" generated, at most --prompt-block (default: {CHUNK})",
        },
    )  # fmt: skip
    parser.set_defaults(max_batch=BATCH, prefill_chunk=CHUNK)
    add_verbose(parser)
    add_options(parser, LoadConfig)
    parser.show("out", "url")


def main(args: argparse.Namespace) -> None:
    load, config = take(args, LoadConfig), take(args, ServeConfig)
    need_extra("batch")
    if args.url is None:
        config.check_drafts()
        check_early(load)
        check_name(args.model)
        if args.api_key_file is not None:
            raise UsageError("--api-key-file is for a server: give its address with --url")
    elif others := configured(args).keys() - {"max_batch"}:
        raise UsageError(
            "with --url the server has the model and its options: leave out"
            f" {flag(min(others))}, or give it to `greenroom serve`"
        )
    name = args.model if args.url else config.model_name or name_of(args.model)
    adapters = adapter_names(load.adapter, name)
    if len(adapters) < 2:  # one replaces the model's experts
        adapters = ()
    elif args.url is None:
        config.check_variants(load)

    from greenroom.server.batch.requests import read_requests
    from greenroom.server.batch.results import Results

    if args.out.exists() and args.file.exists() and args.out.samefile(args.file):
        raise UsageError(f"{args.out} has the requests: give another file with --out")
    requests = read_requests(args.file, name, adapters)
    with Results(args.out, requests) as results:
        before = len(results.done)
        if before == len(requests):
            print(f"all {before:,} requests have their answers in {args.out}")
        elif args.url is not None:
            _send(args, config, requests, results)
        else:
            config = replace(config, max_queue=config.max_batch, timeout=FOREVER_S, no_page=True)
            _answer(args, load, config, (name, *adapters), requests, results)


def _answer(
    args: argparse.Namespace,
    load: LoadConfig,
    config: ServeConfig,
    models: Sequence[str],
    requests: Sequence[BatchRequest],
    results: Results,
) -> None:
    """Load the model, answer the requests that have no result, and print what was done.

    `models` are the names of the model and of its adapters, of which a request names one.
    """
    from greenroom.server.batch.run import WAITING, LocalAnswerer, Tally
    from greenroom.server.chat.local import wait_until_loaded
    from greenroom.server.engine.start import start
    from greenroom.server.http.service import Service

    tally = Tally()
    with model_progress(args.model) as progress:
        quiet(progress)
        name, *adapters = models
        several = len(adapters) > 0
        engine = start(args.model, load, config, verbose=args.verbose, variants=several)
        service = Service(engine, config, name, log=tally, adapters=adapters)
        try:
            wait_until_loaded(
                engine, lambda share: progress.say(f"{args.model}: loading", share, 1)
            )
            progress.clear()
            tally.log_message(engine.summary)
            collect_garbage()
            _run(
                args, LocalAnswerer(service), config.max_batch + WAITING, requests, results,
                progress, lambda seconds: (
                    f", {tally.prompt_tokens:,} tokens of prompts ({tally.reused_tokens:,} reused),"
                    f" {tally.new_tokens:,} of answers: {tally.new_tokens / seconds:.1f} tokens/s"
                ),
            )  # fmt: skip
        finally:
            engine.stop(0.0)
            service.close()


def _send(
    args: argparse.Namespace,
    config: ServeConfig,
    requests: Sequence[BatchRequest],
    results: Results,
) -> None:
    """Send the requests that have no result to a server, and print what was done."""
    from greenroom.server.batch.remote import RemoteAnswerer
    from greenroom.server.http.keys import read_api_key

    answerer = RemoteAnswerer(args.url, read_api_key(args.api_key_file))
    answerer.check_model(args.model)
    with Progress(f"{args.model} at {args.url}") as progress:
        _run(args, answerer, config.max_batch, requests, results, progress, lambda seconds: "")


def _run(
    args: argparse.Namespace,
    answerer: Answerer,
    at_once: int,
    requests: Sequence[BatchRequest],
    results: Results,
    progress: Progress,
    speed: Callable[[float], str],
) -> None:
    """Answer the requests that have no result, and print what was done, with their `speed`."""
    import asyncio

    from greenroom.server.batch.run import BatchRun

    before, begin = len(results.done), time.monotonic()
    run = BatchRun(answerer, at_once, results, lambda: _show(progress, results, len(requests)))
    asyncio.run(run.run(args.file, requests))
    seconds = time.monotonic() - begin
    progress.clear()
    print(
        f"{len(results.done):,} of {len(requests):,} requests have answers in {args.out}"
        f"{f' ({before:,} from before)' if before else ''}; {seconds:.1f} s{speed(seconds)}"
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
