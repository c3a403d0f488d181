"""`greenroom trace budgets TRACE -o FILE`: divides cache slots among layers, from a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.estimate.machine import profile
from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.files import add_out, check_target, write_file
from greenroom.cli.terminal.progress import Progress
from greenroom.config import BUDGETS, BudgetsConfig
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.trace import Trace

HELP = "compute how many cache slots each layer should have, for --scope FILE (and --split FILE)"
VERSION = 1


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="recorded routing: a file of `greenroom trace record`, or an npz file",
    )
    add_options(parser, BudgetsConfig)
    add_out(parser, "the JSON file to write")


def main(args: argparse.Namespace) -> None:
    config = take(args, BudgetsConfig)
    check_target(args.out)
    with Progress(f"reading {args.trace}") as progress:
        from greenroom.sim.study import capacities
        from greenroom.trace import load

        trace = load(args.trace)
        if config.limit is not None:
            trace = trace.head(config.limit)
        slots = capacities(config.capacity, int(trace.offsets[-1]))
        if len(slots) != 1:
            raise UsageError(
                "--capacity must be a single number or share here, not several,"
                f" got {config.capacity!r}"
            )
        progress.say("dividing slots among layers")
        result = budgets(config, trace, slots[0])
    content = {
        "format": BUDGETS, "version": VERSION, "model": trace.meta.get("model"),
        "method": config.method, "capacity": slots[0], **result,
    }  # fmt: skip
    write_file(args.out, json.dumps(content, indent=1) + "\n")
    shown = ", ".join(f"{n:g}" for n in result["slots"])
    print(f"{args.out}: {slots[0]} slots, by layer: {shown}")
    if "split" in result:
        print(
            "share of an expert in its top segment, by layer: "
            + ", ".join(f"{share:.2f}" for share in result["split"])
        )


def budgets(config: BudgetsConfig, trace: Trace, capacity: int) -> dict[str, Any]:
    """Compute the number of cache slots of each layer from a routing trace.

    Returns `slots` and, with the method moepic, `split`: for each layer, the share of a split
    expert that is cached, its top segment.
    """
    from greenroom.plan.budgets import METHODS as BY_TABLES
    from greenroom.plan.budgets import exposed_tables, miss_tables
    from greenroom.sim.study import costs_of
    from greenroom.trace import stream

    requests = stream(trace, "runtime")
    if config.machine is None:
        tables = miss_tables(requests, trace.offsets)
    else:
        costs, expert_bytes = costs_of(config, trace, profile(config.machine))
        if config.method == "moepic":
            return moepic(config, trace, capacity, costs, expert_bytes)
        tables = exposed_tables(requests, trace.offsets, costs, expert_bytes)
    return {"slots": BY_TABLES[config.method](tables, capacity)}


def moepic(
    config: BudgetsConfig, trace: Trace, capacity: int, costs: Costs, expert_bytes: int
) -> dict[str, Any]:
    """Compute slots and splits of layers by MoEpic's Algorithm 1, from a routing trace.

    The algorithm counts the experts that the trace's generated tokens used, and those that were
    predicted for them. Returns `slots` and `split`, with one value for each layer.
    """
    from greenroom.plan.configurator import TokenLatency, configure, layer_statistics
    from greenroom.plan.sizing import recorded_activity

    activity = recorded_activity(trace, config.predictions)
    latency = TokenLatency.of(costs, expert_bytes, trace.top_k)
    chosen = configure(layer_statistics(activity), float(capacity), latency, config.zeta)
    return {
        "slots": [each.budget for each in chosen],
        "split": [each.ratio for each in chosen],
    }
