"""`greenroom trace record MODEL`: records which experts a model uses to answer prompts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, add_verbose, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target
from greenroom.cli.terminal.progress import Progress, model_progress, open_model
from greenroom.cli.trace.out import contents
from greenroom.config import LoadConfig, RecordConfig, SamplingConfig

if TYPE_CHECKING:
    from greenroom.runtime.driver.stats import Stats
    from greenroom.trace.prompts import Prompt

HELP = "answer prompts with a model, and record which experts each token uses"


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", required=True, type=Path,
        help="file of prompts: one a line, or JSON lines with `prompt` or `messages`, and"
        " optionally"
        " `label`",
    )  # fmt: skip
    add_out(parser, "the trace file to write")
    add_options(parser, RecordConfig, "what to record")
    add_options(parser, SamplingConfig, "sampling")
    add_verbose(parser)
    add_options(parser, LoadConfig)


def main(args: argparse.Namespace) -> None:
    load, sampling = take(args, LoadConfig), take(args, SamplingConfig)
    recording = take(args, RecordConfig)
    check_early(load)
    check_target(args.out)

    from greenroom.trace.prompts import read_prompts

    prompts = read_prompts(args.prompts)
    with model_progress(args.model) as progress:
        stats = _recorded(args, load, sampling, recording, prompts, progress)

    from greenroom.trace import load as load_trace

    print(f"{args.out}: {contents(load_trace(args.out))}")
    print(
        f"expert cache: {stats.expert_requests:,} requests,"
        f" {stats.expert_requests - stats.expert_hits:,} misses ({stats.capacity:,} slots,"
        f" {stats.policy}; a request is an expert of a pass, however many tokens use it)",
        file=sys.stderr,
    )


def _recorded(
    args: argparse.Namespace,
    load: LoadConfig,
    sampling: SamplingConfig,
    recording: RecordConfig,
    prompts: list[Prompt],
    progress: Progress,
) -> Stats:
    """Load the model, answer the prompts, and write the trace of their routing."""
    from greenroom.hf.measure.recording import record
    from greenroom.runtime.recording.forecasts import parse_predictors
    from greenroom.trace.journal import journal_path

    if recording.predict is not None:
        parse_predictors(recording.predict)  # wrong names are errors before a model is loaded
    began = False

    def recorded(done: int, tokens: int) -> None:
        nonlocal began
        began = True
        if done and not tokens:
            progress.clear()
            print(
                f"continuing the recording after the {done} requests of an earlier run",
                file=sys.stderr,
            )
        progress.say("recording requests", done, len(prompts))

    try:
        with open_model(args.model, load, progress, args.verbose) as (model, tokenizer):
            record(
                model, tokenizer, prompts, args.out,
                sampling=sampling, recording=recording, name=args.model, on_request=recorded,
            )  # fmt: skip
            stats: Stats = model.greenroom.stats()
            return stats
    except BaseException as error:
        if began and (journal := journal_path(args.out)).exists():
            message = f"the recording so far is in {journal}: the same command continues it"
            if isinstance(error, KeyboardInterrupt):
                error.args = (message,)
            else:
                progress.clear()
                print(message, file=sys.stderr)
        raise
