"""`greenroom run MODEL [PROMPT]`: answers a prompt with a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, add_verbose, configured, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import check_target
from greenroom.cli.terminal.progress import Progress, model_progress, open_model
from greenroom.config import MTP, OFF, LoadConfig, SamplingConfig, SpeculationConfig, show_bytes
from greenroom.config.tables import SYSTEMS
from greenroom.errors import UsageError
from greenroom.sim.table import show_time

if TYPE_CHECKING:
    from greenroom.hf.text.generate import Answer, OnText, TokenClock
    from greenroom.runtime.driver.stats import Stats

    OnStart = Callable[[TokenClock], None]

HELP = "answer a prompt with a model, which may be larger than memory"
SYSTEM = (
    f"take policy, prefetching and more from a published system: {', '.join(SYSTEMS)};"
    " NAME+greenroom prefetches only what saves time; your own options take precedence"
)

ANSWER_FIELDS = (
    "text", "token_ids", "prompt_tokens", "new_tokens", "ttft_s", "tpot_s", "tpot_p95_s",
    "tpot_p99_s", "tokens_per_s",
)  # fmt: skip
STATS_FIELDS = (
    "capacity", "capacity_least", "capacity_most", "expert_requests", "expert_hits", "hit_ratio",
    "bytes_read", "stall_s", "peak_rss_bytes", "memory_bytes", "budget_bytes", "policy", "kernels",
    "prefetch", "stalls", "links",
)  # fmt: skip
OPTIONAL_FIELDS = (
    "split",
    "approximated",
    "subset",
    "co_compute",
    "pressure",
)  # where there are any


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?",
        help="the text to answer (default: standard input, without its final newline)",
    )  # fmt: skip
    parser.add_argument(
        "--raw", action="store_true",
        help="continue the prompt as it is, without the model's chat template",
    )  # fmt: skip
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with the answer and its times, and nothing else",
    )
    output.add_argument(
        "--live",
        action="store_true",
        help="show a screen during the answer: speed, memory, which experts are in memory, misses,"
        " reads and the text",
    )
    parser.add_argument(
        "--timeline", metavar="FILE", type=Path,
        help="write a timeline of reads and computation to this file, for ui.perfetto.dev or"
        " chrome://tracing",
    )  # fmt: skip
    parser.add_argument("--system", metavar="NAME", help=SYSTEM)
    add_options(parser, SamplingConfig, "sampling")
    add_options(parser, SpeculationConfig)
    add_verbose(parser)
    add_options(parser, LoadConfig)
    parser.show("json", "adapter")


def main(args: argparse.Namespace) -> None:
    if args.system is not None:
        apply(args)
    load, sampling = take(args, LoadConfig), take(args, SamplingConfig)
    speculation = take(args, SpeculationConfig)
    if load.predictor is not None and load.prefetch == "off":  # `trace record` allows both
        raise UsageError(
            "--predictor is for prefetching, but --prefetch is off: leave out --predictor, or give"
            " --prefetch learned"
        )
    check_early(load)
    prompt = text_of(args.prompt if args.prompt is not None else _from_stdin())
    if args.timeline is not None:
        check_target(args.timeline)
    with model_progress(args.model) as progress:
        _run(args, load, sampling, speculation, prompt, progress)


def apply(args: argparse.Namespace) -> None:
    """Set the options that `greenroom run --system` implies and the user left out.

    UsageError names the options without which a part of the system would be missing.
    """
    from greenroom.plan.systems.table import system, system_options

    fields = LoadConfig.__dataclass_fields__
    mine = {name: value for name, value in configured(args).items() if name in fields}
    for name, value in system_options(system(args.system), mine, fields).items():
        setattr(args, name, value)


def _run(
    args: argparse.Namespace,
    load: LoadConfig,
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    prompt: str,
    progress: Progress,
) -> None:
    from greenroom.hf.check.loss import describe_loss, stored_loss
    from greenroom.hf.text.generate import DraftedLoop, answer

    out = _Out(shown=not args.json)
    mtp = speculation.speculate == MTP
    with open_model(args.model, load, progress, args.verbose, mtp) as (model, tokenizer):
        greenroom, loop = model.greenroom, None
        if speculation.speculate != OFF:
            loop = DraftedLoop(model)
            print(loop.description, file=sys.stderr)
        greenroom.timeline(args.timeline is not None)
        with out, _shown(args, model, out) as (on_start, on_text):
            result = answer(
                model, tokenizer, prompt, sampling, raw=args.raw, context=greenroom.setup.context,
                on_text=on_text, on_start=on_start, loop=loop,
            )  # fmt: skip
        stats, timeline = greenroom.stats(), greenroom.timeline(False)
        loss = stored_loss(greenroom.setup)
    drafts = None if loop is None else loop.speculation.as_json()
    for verdict in (stats.prefetch["verdict"], drafts and drafts["verdict"]):
        if verdict:
            print(verdict, file=sys.stderr)
    inexact = stats.approximated is not None
    if args.json:
        cost = {"quality": None if loss is None else asdict(loss)} if inexact else {}
        more = {} if drafts is None else {"speculation": drafts}
        print(json.dumps({**as_json(result, stats), **cost, **more}))
    else:
        print(closing_line(result, stats), file=sys.stderr)
        if inexact:
            print(describe_loss(args.model, loss), file=sys.stderr)
    if timeline is not None:
        timeline.save(args.timeline)


@contextlib.contextmanager
def _shown(args: argparse.Namespace, model: Any, out: _Out) -> Iterator[tuple[OnStart, OnText]]:
    """Show an answer as plain text, or with `--live` on the live screen, as a context manager.

    It returns two functions: one gets the tokens' clock, the other each piece of text.
    """
    if not args.live:
        yield lambda clock: None, out.write
        return
    from greenroom.cli.screen.frame import ModelFacts, RunReader
    from greenroom.cli.screen.layout import View
    from greenroom.cli.screen.screen import NO_TERMINAL, LiveScreen, has_terminal
    from greenroom.cli.serve import name_of

    if not has_terminal():
        print(NO_TERMINAL, file=sys.stderr)
        yield lambda clock: None, out.write
        return
    reader, view = RunReader(model), View(ModelFacts.of(name_of(args.model), model.greenroom))
    with LiveScreen(view, reader.read, lambda text, reasoning: out.write(text)) as screen:
        yield reader.start, screen.write


class _Out:
    """Writer of an answer on standard output; its last line always ends, even after an error."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._open = shown, False

    def write(self, text: str) -> None:
        if self._shown:
            self._open = True
            sys.stdout.write(text)
            sys.stdout.flush()

    def __enter__(self) -> _Out:
        if hasattr(sys.stdout, "reconfigure"):  # a terminal that lacks a character shows a "?"
            sys.stdout.reconfigure(errors="replace")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        broken = kind is not None and issubclass(kind, OSError)
        if self._shown and not broken and (self._open or kind is None):
            self.write("\n")


def text_of(prompt: str) -> str:
    """Return a prompt unchanged; raises UsageError if it is empty or not valid UTF-8."""
    if not prompt:
        raise UsageError("the prompt is empty: give some text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8 text") from error
    return prompt


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt: give one after MODEL, or on standard input")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not valid UTF-8 text") from error


def as_json(result: Answer, stats: Stats) -> dict[str, Any]:
    """Return the object that `greenroom run --json` prints: the answer and statistics."""
    fields = {name: getattr(result, name) for name in ANSWER_FIELDS}
    fields |= {name: stats[name] for name in STATS_FIELDS}
    return fields | {name: stats[name] for name in OPTIONAL_FIELDS if stats[name] is not None}


def closing_line(result: Answer, stats: Stats) -> str:
    """Return the line that ends a run: tokens, times, hits, prefetches, bytes and memory."""
    from greenroom.cli.terminal.summary import (
        co_compute_line,
        inexact_line,
        prefetched,
        pressure_line,
    )

    parts = [
        f"{result.prompt_tokens} prompt + {result.new_tokens} new tokens",
        f"TTFT {show_time(result.ttft_s)}",
    ]
    if result.gaps:
        parts.append(f"TPOT p50 {show_time(result.tpot_s)}, p95 {show_time(result.tpot_p95_s)}")
        parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    parts += [f"hit ratio {stats.hit_ratio:.1%}", *prefetched(stats)]
    if stats.approximated is not None:
        parts.append(f"inexact: {inexact_line(stats.approximated)}")
    if stats.co_compute is not None:
        parts.append(f"misses: {co_compute_line(stats.co_compute)}")
    if stats.capacity_least < stats.capacity_most:  # the KV cache grew and shrank
        parts.append(
            f"{stats.capacity:,} slots (between {stats.capacity_least:,} and"
            f" {stats.capacity_most:,})"
        )
    if stats.pressure is not None and stats.pressure["shrinks"]:
        parts.append(pressure_line(stats.pressure))
    total = result.prompt_tokens + result.new_tokens
    parts.append(f"{show_bytes(stats.bytes_read / total)} read per token")
    budget = f" of {show_bytes(stats.budget_bytes)} budget" if stats.budget_bytes else ""
    parts.append(f"peak memory {show_bytes(stats.peak_rss_bytes)}{budget}")
    if result.cut_short:
        parts.append("the answer stopped at the end of --context")
    return " · ".join(parts)
