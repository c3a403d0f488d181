"""`greenroom bench MODEL --system A,B,C`: named systems in one table, on this machine and model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, given, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress, model_progress, quiet
from greenroom.config import SCOPES, BenchmarkConfig, LoadConfig, show_bytes
from greenroom.errors import UsageError
from greenroom.sim.table import text_table

if TYPE_CHECKING:
    from greenroom.hf.measure.entries import Entry
    from greenroom.hf.measure.harness import Harness
    from greenroom.trace.prompts import Prompt

HELP = "measure named systems against each other, on this machine and model"
DEFAULT = "greenroom,llru,mixtral-offloading,moe-infinity"


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--system", metavar="S[,S...]", default=DEFAULT,
        help="by name, the first is what others are compared with (default: %(default)s);"
        " --policy and --prefetch beside it override their rows, and what only some have (--pin,"
        " --split, sizes of --scope, ...) is theirs",
    )  # fmt: skip
    add_json(parser, "a JSON list of objects")
    add_options(parser, BenchmarkConfig, "measuring")
    add_options(parser, LoadConfig)
    parser.show("system", "json")


def main(args: argparse.Namespace) -> None:
    how = take(args, BenchmarkConfig)
    # Others may be a part of some rows only.
    named = ("policy", "prefetch", "predictor", "device")
    check_early(LoadConfig(**{name: getattr(args, name) for name in named}))
    with model_progress(args.model) as progress:
        load, entries = entries_of(args)
        check_early(load)
        stage = play(args, load, how, entries, prompts_of(how), progress)
    measured = [entry for entry in entries if entry.rounds]
    left_out = [
        f"{each.name} is left out: {each.skip_reason}" for each in entries if each.skip_reason
    ]
    if not measured:
        raise UsageError("; ".join(left_out))
    rows = [entry.as_row(measured[0]) for entry in measured]
    if args.json:
        print(json.dumps(rows))
        print(*left_out, sep="\n", end="\n" * bool(left_out), file=sys.stderr)
        return
    notes = [f"{row['name']}: {'; '.join(row['notes'])}" for row in rows]
    print("\n".join([table(rows, stage), "", *notes, *left_out]))


def entries_of(args: argparse.Namespace) -> tuple[LoadConfig, list[Entry]]:
    """What the model is loaded with, and the systems as settings of a run. Of several each has the
    parts that are its own, and one that cannot be put together says why; a single one has all that
    was given, and is a UsageError then."""
    from greenroom.hf.measure.entries import Entry
    from greenroom.plan.systems.table import check_parts, system_options, systems

    known, rows = LoadConfig.__dataclass_fields__, systems(args.system)
    mine = {name: value for name, value in given(args).items() if name in known}
    if len(rows) == 1:
        load, own = take(args, LoadConfig), [mine]
    else:
        check_parts(rows, mine)
        own = [row.takes(mine) for row in rows]
        load = shared(args, own)
    entries = []
    for row, part in zip(rows, own, strict=True):
        calibrated_options = tuple(
            name for name in row.routed() if part.get(name, "auto") == "auto"
        )
        entry = Entry(row.name, load, calibrated_options=calibrated_options, notes=[row.reading])
        try:
            asked = {name: value for name, value in part.items() if name not in calibrated_options}
            entry.config = replace(load, **system_options(row, asked, known, calibrated_options))
        except UsageError as error:
            if len(rows) == 1:
                raise
            entry.skip_reason = str(error)
        entries.append(entry)
    return load, entries


def shared(args: argparse.Namespace, own: list[dict[str, Any]]) -> LoadConfig:
    """What all rows have of the options given; `own` is what each of them has. UsageError for what
    cannot be right, whosever it is."""
    known = LoadConfig.__dataclass_fields__
    every = set(known).intersection(*own) | {n for n in known if not any(n in o for o in own)}
    load = LoadConfig(**{name: getattr(args, name) for name in known if name in every})
    for part in own:
        replace(load, **part)
    return load


def prompts_of(how: BenchmarkConfig) -> list[Prompt]:
    from greenroom.hf.measure.rounds import PROMPTS
    from greenroom.trace.prompts import read_prompts

    return list(PROMPTS) if how.prompts is None else read_prompts(Path(how.prompts))


def play(
    args: argparse.Namespace,
    load: LoadConfig,
    how: BenchmarkConfig,
    entries: list[Entry],
    prompts: list[Prompt],
    progress: Progress,
) -> Harness:
    """Load the model, have every entry its turns, and end it."""
    from greenroom.hf.measure.harness import Harness
    from greenroom.hf.measure.rounds import run_rounds

    quiet(progress)
    stage = Harness(args.model, load, progress.of(args.model))
    try:
        if stage.capacity >= stage.experts:
            raise UsageError(
                f"all {stage.experts:,} experts of {args.model} fit into memory: there is nothing"
                " to choose; give less --memory or --cache"
            )
        run_rounds(
            stage, entries, prompts=prompts, tokens=how.tokens, rounds=how.rounds, raw=how.raw,
            seconds=how.seconds or float("inf"), report=progress.say,
        )  # fmt: skip
    finally:
        stage.close()
    return stage


def table(rows: list[dict[str, Any]], stage: Harness) -> str:
    """For people: means and 95 % intervals over rounds that were played in turns."""
    first = rows[0]["name"]
    header = ("system", "policy", "scope", "prefetch", "TPOT ms", f"of {first}", "TTFT s",
              "miss ratio", "read a token", "stalled a token")  # fmt: skip
    lines = [
        (
            row["name"], row["policy"], _by_name(row["scope"]), row["prefetch"],
            _interval(row["tpot_s"], 1e3), _interval(row["ratio"]), _interval(row["ttft_s"]),
            f"{row['miss_ratio']:.1%}", show_bytes(row["bytes_per_token"]),
            f"{row['stall_s_per_token'] * 1e3:.1f} ms",
        )
        for row in rows
    ]  # fmt: skip
    notes = [
        f"{row['name']} gave other tokens than {first}" for row in rows if not row["same_tokens"]
    ]
    return "\n".join(
        [
            f"{stage.capacity:,} of {stage.experts:,} experts in memory, {rows[0]['rounds']} rounds"
            " in turns; means with 95 % intervals",
            "",
            text_table(header, lines, left=4),
            *notes,
        ]
    )


def _by_name(scope: str) -> str:
    """Numbers are too many for a column."""
    return scope if scope in SCOPES else "by layer"


def _interval(found: tuple[float, float, float], factor: float = 1.0) -> str:
    middle, low, high = (value * factor for value in found)
    return f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g} to {high:.3g})"
