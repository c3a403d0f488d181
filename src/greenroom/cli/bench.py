"""`greenroom bench MODEL --system A,B,C`: measures published systems against each other."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.early.checks import check_early
from greenroom.cli.estimate.machine import default_profile, profile
from greenroom.cli.options.fields import add_model, add_options, configured, take
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

HELP = "measure published systems (policy, prefetching and more) against each other on a model"
DEFAULT = "greenroom,llru,mixtral-offloading,moe-infinity"


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--system", metavar="S[,S...]",
        help="names of systems, or NAME+greenroom, which prefetches only what saves time; all are"
        " compared with the first (default:"
        f" {DEFAULT}). --policy"
        " and --prefetch replace those of all systems. Options that only some systems have (--pin,"
        " --split, sizes in --scope, ...) apply only to these",
    )  # fmt: skip
    parser.add_argument(
        "--share", action="store_true",
        help="print a report for a public table, as Markdown with JSON: machine, model, settings,"
        " figures; without names of files, machines and users. Measures greenroom alone unless"
        " --system names others",
    )  # fmt: skip
    add_json(parser, "a JSON list of objects; with --share the report's object")
    add_options(parser, BenchmarkConfig, "measuring")
    add_options(parser, LoadConfig)
    parser.show("system", "share", "json")


def main(args: argparse.Namespace) -> None:
    how = take(args, BenchmarkConfig)
    if args.system is None:
        args.system = "greenroom" if args.share else DEFAULT
    # Other options may belong to some systems only.
    named = ("policy", "prefetch", "predictor", "device")
    check_early(LoadConfig(**{name: getattr(args, name) for name in named}))
    with model_progress(args.model) as progress:
        load, entries = entries_of(args)
        check_early(load)
        harness = run_entries(args, load, how, entries, prompts_of(how), progress)
    measured = [entry for entry in entries if entry.rounds]
    left_out = left_out_of(entries)
    if not measured:
        raise UsageError("; ".join(left_out))
    if args.share:
        share(args, harness, measured, load, how, left_out)
        return
    rows = [entry.as_row(measured[0]) for entry in measured]
    if args.json:
        print(json.dumps(rows))
        print(*left_out, sep="\n", end="\n" * bool(left_out), file=sys.stderr)
        return
    notes = [f"{row['name']}: {'; '.join(row['notes'])}" for row in rows]
    print("\n".join([table(rows, harness), "", *notes, *left_out]))


def left_out_of(entries: list[Entry]) -> list[str]:
    """Return a line for each benchmark entry that could not be measured, which says why."""
    return [f"{each.name} is left out: {each.skip_reason}" for each in entries if each.skip_reason]


def share(
    args: argparse.Namespace,
    harness: Harness,
    measured: list[Entry],
    load: LoadConfig,
    how: BenchmarkConfig,
    left_out: list[str],
) -> None:
    """Print a benchmark's report for a public table; what is left out goes to standard error."""
    from greenroom.hf.measure.share import Report

    machine = profile("auto") if default_profile().exists() else None
    report = Report.of(harness, measured, load, how, machine)
    print(json.dumps(report.as_json()) if args.json else report.as_markdown())
    print(*left_out, sep="\n", end="\n" * bool(left_out), file=sys.stderr)


def entries_of(args: argparse.Namespace) -> tuple[LoadConfig, list[Entry]]:
    """Return the config that loads the model, and a benchmark entry for each system.

    With several systems, each gets those of the user's options that it supports; an entry whose
    system needs further options has a `skip_reason`. A single system gets all of the user's
    options, and UsageError names the options that it still needs.
    """
    from greenroom.hf.measure.entries import Entry
    from greenroom.plan.systems.table import check_parts, system_options, systems

    fields, rows = LoadConfig.__dataclass_fields__, systems(args.system)
    mine = {name: value for name, value in configured(args).items() if name in fields}
    if len(rows) == 1:
        load, parts = take(args, LoadConfig), [mine]
    else:
        check_parts(rows, mine)
        parts = [row.select_options(mine) for row in rows]
        load = shared_config(args, parts)
    entries = []
    for row, part in zip(rows, parts, strict=True):
        calibrated_options = tuple(
            name for name in row.calibrated_options() if part.get(name, "auto") == "auto"
        )
        entry = Entry(row.name, load, calibrated_options=calibrated_options, notes=[row.reading])
        try:
            options_of_row = {
                name: value for name, value in part.items() if name not in calibrated_options
            }
            entry.config = replace(
                load, **system_options(row, options_of_row, fields, calibrated_options)
            )
        except UsageError as error:
            if len(rows) == 1:
                raise
            entry.skip_reason = str(error)
        entries.append(entry)
    return load, entries


def shared_config(args: argparse.Namespace, parts: list[dict[str, Any]]) -> LoadConfig:
    """Return a config of the user options that apply to all benchmarked systems.

    `parts` are the options that apply to each system. UsageError for an invalid value.
    """
    fields = LoadConfig.__dataclass_fields__
    every = set(fields).intersection(*parts) | {
        n for n in fields if not any(n in part for part in parts)
    }
    load = LoadConfig(**{name: getattr(args, name) for name in fields if name in every})
    for part in parts:
        replace(load, **part)
    return load


def prompts_of(how: BenchmarkConfig) -> list[Prompt]:
    """Return the prompts of a benchmark: those of its file, or six short ones."""
    from greenroom.hf.measure.rounds import PROMPTS
    from greenroom.trace.prompts import read_prompts

    return list(PROMPTS) if how.prompts is None else read_prompts(Path(how.prompts))


def run_entries(
    args: argparse.Namespace,
    load: LoadConfig,
    how: BenchmarkConfig,
    entries: list[Entry],
    prompts: list[Prompt],
    progress: Progress,
) -> Harness:
    """Load a model, measure the benchmark entries in interleaved rounds, and unload the model.

    `load` is the config that loads the model; `progress` shows the measurement. UsageError if all
    experts fit in memory.
    """
    from greenroom.hf.measure.harness import Harness
    from greenroom.hf.measure.rounds import run_rounds

    quiet(progress)
    harness = Harness(args.model, load, progress.of(args.model))
    try:
        if harness.capacity >= harness.experts and not (args.share and len(entries) == 1):
            raise UsageError(
                f"all {harness.experts:,} experts of {args.model} fit in memory, so there is"
                " nothing to compare: give a smaller --memory or --cache"
            )
        run_rounds(
            harness, entries, prompts=prompts, tokens=how.tokens, rounds=how.rounds, raw=how.raw,
            seconds=how.seconds or float("inf"), report=progress.say,
        )  # fmt: skip
    finally:
        harness.close()
    return harness


def table(rows: list[dict[str, Any]], harness: Harness) -> str:
    """Format the results of a benchmark as a table: means with 95 % intervals over rounds."""
    first = rows[0]["name"]
    header = ("system", "policy", "scope", "prefetch", "TPOT ms", f"of {first}", "TTFT s",
              "miss ratio", "read per token", "stalled per token")  # fmt: skip
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
        f"{row['name']} generated other tokens than {first}"
        for row in rows
        if not row["same_tokens"]
    ]
    return "\n".join(
        [
            f"{harness.capacity:,} of {harness.experts:,} experts in memory, {rows[0]['rounds']}"
            " interleaved rounds; means with 95 % intervals",
            "",
            text_table(header, lines, left=4),
            *notes,
        ]
    )


def _by_name(scope: str) -> str:
    """Return a cache scope's name; a list of sizes does not fit in a column."""
    return scope if scope in SCOPES else "by layer"


def _interval(values: tuple[float, float, float], factor: float = 1.0) -> str:
    middle, low, high = (value * factor for value in values)
    return f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g} to {high:.3g})"
