"""`greenroom simulate TRACE`: simulates cache policies on recorded routing.

The results are misses and, with a machine's profile, times.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.estimate.machine import profile
from greenroom.cli.options.fields import add_options, configured, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_json, check_target, command_of, write_file
from greenroom.cli.terminal.progress import Progress
from greenroom.config import PINS, SimulateConfig
from greenroom.errors import UsageError
from greenroom.sim.table import rows_text, table_of, trace_heading

if TYPE_CHECKING:
    from greenroom.sim.study import Cell, Row, Study
    from greenroom.trace import Trace

HELP = "simulate the expert cache on recorded routing: misses and times by policy and capacity"
TEXTS = {
    "split": "cut each expert in two and cache only its top segment, which is this share of it: one"
    " share, one for each layer, or a file of `greenroom trace budgets`; --capacity then counts"
    " unsplit experts (default: off)",
    "miss_precision": "serve cache misses with a low gate weight from copies in this precision;"
    " experts are assumed to be stored in 16 bits (default: off)",
    "co_compute": "auto: compute cache misses on the host's processor if that is sooner than moving"
    " them to the GPU (default: off, but auto for systems with this part)",
}


def add_to(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "trace",
        metavar="TRACE",
        type=Path,
        help="recorded routing: a file of `greenroom trace record`, or an npz file",
    )
    add_json(parser, "a JSON object, or a list of them for several policies or capacities")
    add(
        "--report",
        metavar="FILE",
        type=Path,
        help="write one HTML page with miss-ratio curves and tables",
    )
    add_options(parser, SimulateConfig, texts=TEXTS)
    parser.show("json", "report")


def main(args: argparse.Namespace) -> None:
    config = take(args, SimulateConfig)
    if config.system is not None and args.report is not None:
        raise UsageError("--report draws curves of policies: leave out --system, and give --policy")
    if args.report is not None:
        check_target(args.report)
    with Progress(f"reading {args.trace}") as progress:
        page, rows, trace = _simulate(args, config, progress)
    _show(args, rows, trace)
    if page is not None:
        write_file(args.report, page)
        print(f"report: {args.report}", file=sys.stderr)


def _simulate(
    args: argparse.Namespace, config: SimulateConfig, progress: Progress
) -> tuple[str | None, list[Row], Trace]:
    """Simulate all policies and capacities: (the report's page or None, results, trace)."""
    from greenroom.plan.systems.cells import simulate_systems
    from greenroom.plan.systems.table import systems
    from greenroom.policies import policy
    from greenroom.sim.study import Cell, capacities, requested_predictors, split_names, study_of
    from greenroom.trace import load

    policies = split_names(config.policy) if config.policy is not None else []
    for name in policies:
        policy(name)
    if config.system is not None:
        systems(config.system)
    trace = load(args.trace)
    if config.limit is not None:
        trace = trace.head(config.limit)
    slots = capacities(config.capacity, int(trace.offsets[-1]))
    ahead = requested_predictors(config, trace)
    study = study_of(config, trace, profile(config.machine))
    go = partial(run_cells, config.ray, progress)
    if config.system is not None:
        rows = simulate_systems(systems(config.system), configured(args), study, slots, go)
        return None, rows, trace
    cells = [
        Cell(name, capacity, "step" if config.pin not in PINS else config.pin, prefetch)
        for name in policies
        for capacity in slots
        for prefetch in ahead
    ]
    rows = go(study, cells)
    if args.report is None:
        return None, rows, trace
    from greenroom.cli.study.page import page

    curves = partial(go, what="cells of the curves")
    return page(args.trace, config, study, cells, rows, curves, command_of(args)), rows, trace


def _show(args: argparse.Namespace, rows: list[Row], trace: Trace) -> None:
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    print(rows_text(trace_heading(trace, rows[0]), *table_of(rows, int(trace.offsets[-1]))))
    for row in rows:
        if row.get("without"):
            print(f"{row['system']}: without {'; '.join(row['without'])}", file=sys.stderr)


def run_cells(
    ray: str | None, progress: Progress, study: Study, cells: list[Cell], what: str = "cells"
) -> list[Row]:
    """Simulate cells (policy and capacity) of a study, here or on a Ray cluster.

    `ray` is the address of the cluster, or None; `what` names the cells in the progress line.
    """
    from greenroom.sim.sweep import sweep, sweep_on_ray

    count, what = 0, f"simulating {len(cells)} {what}"

    def done() -> None:
        nonlocal count
        count += 1
        progress.say(what, count, len(cells))

    def compiling(name: str, number: int, of: int) -> None:
        progress.say(f"compiling {name}, policy {number + 1} of {of}")

    if ray is not None:
        progress.say(f"{what} on Ray", 0, len(cells))
        return sweep_on_ray(study, cells, ray, done)
    return sweep(study, cells, done=done, compiling=compiling)
