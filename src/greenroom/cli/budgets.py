"""`greenroom trace budgets TRACE -o FILE`: how many slots each layer should have, from a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.output import check_target, write_whole
from greenroom.cli.progress import Progress
from greenroom.config import BUDGETS, Amount
from greenroom.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.trace import Trace

METHODS = ("marginal", "optimal", "moepic")
VERSION = 1


def add_to(parts: Any) -> None:
    text = "how many slots each layer should have, for --scope FILE (and --split FILE)"
    parser = parts.add_parser("budgets", help=text, description=text)
    parser.set_defaults(main=main)
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a trace: safetensors, or npz")
    add(
        "--capacity", metavar="N", required=True, help="slots of all layers, or 25%% of the experts"
    )
    add("--method", metavar="|".join(METHODS), default="optimal",
        help="marginal: the next slots to the layer that gains most; optimal: the least sum, by a"
        " dynamic programme; moepic: its Algorithm 1, which splits experts too (default:"
        " %(default)s)")  # fmt: skip
    add("--machine", metavar="FILE", help="minimise the seconds that computing does not hide on"
        " the machine of this profile, not misses; auto: of this one; moepic needs it")  # fmt: skip
    add("--expert-bytes", metavar="SIZE", help="of one expert (default: what the trace says)")
    add("--dense-bytes", metavar="SIZE", help="of one layer without its experts (default: what the"
        " trace says, else 0)")  # fmt: skip
    add("--predictions", metavar="NAME", help="moepic: the trace's predictions that experts would"
        " be prefetched by (default: the first there are)")  # fmt: skip
    add("--zeta", type=float, default=0.01, metavar="Z",
        help="moepic: share of all slots that one step moves (default: %(default)s)")  # fmt: skip
    add("--limit", type=int, metavar="TOKENS", help="only the trace's first tokens")
    add("-o", "--out", metavar="FILE", required=True, type=Path, help="the JSON file to write")


def main(args: argparse.Namespace) -> None:
    check(args)

    check_target(args.out)
    with Progress(f"reading {args.trace}") as progress:
        from greenroom.sim.sweep import capacities
        from greenroom.trace import load

        trace = load(args.trace)
        if args.limit is not None:
            trace = trace.head(args.limit)
        slots = capacities(args.capacity, int(trace.offsets[-1]))
        if len(slots) != 1:
            raise UsageError(f"--capacity is one number here, got {args.capacity}")
        progress.say("sharing out slots")
        found = budgets(args, trace, slots[0])
    made = {
        "format": BUDGETS, "version": VERSION, "model": trace.meta.get("model"),
        "method": args.method, "capacity": slots[0], **found,
    }  # fmt: skip
    write_whole(args.out, json.dumps(made, indent=1) + "\n")
    shown = ", ".join(f"{n:g}" for n in found["slots"])
    print(f"{args.out}: {slots[0]} slots as {shown}")
    if "split" in found:
        print("top segments " + ", ".join(f"{share:.2f}" for share in found["split"]))


def check(args: argparse.Namespace) -> None:
    """What can be said before a trace is read."""
    if args.method not in METHODS:
        raise UnknownName("method", args.method, METHODS)
    if args.method == "moepic" and args.machine is None:
        raise UsageError("--method moepic weighs loading against computing: give --machine")
    if args.machine is None:
        for name in ("expert_bytes", "dense_bytes"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of use with --machine only")
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be at least 1 token, got {args.limit}")


def budgets(args: argparse.Namespace, trace: Trace, capacity: int) -> dict[str, Any]:
    """`slots` of each layer and, of moepic, `split`."""
    from greenroom.plan.budgets import METHODS as BY_TABLES
    from greenroom.plan.budgets import exposed_tables, miss_tables
    from greenroom.trace import stream

    costs, expert_bytes = machine_costs(args, trace)
    if args.method == "moepic":
        assert costs is not None
        return moepic(args, trace, capacity, costs, expert_bytes)
    requests = stream(trace, "runtime")
    if costs is None:
        tables = miss_tables(requests, trace.offsets)
    else:
        tables = exposed_tables(requests, trace.offsets, costs, expert_bytes)
    return {"slots": BY_TABLES[args.method](tables, capacity)}


def moepic(
    args: argparse.Namespace, trace: Trace, capacity: int, costs: Costs, expert_bytes: int
) -> dict[str, Any]:
    """Algorithm 1 over what the trace's decoded tokens activated and what had been predicted."""
    from greenroom.plan.configurator import Latency, configure, layers_of
    from greenroom.plan.recorded import activity_of

    activity = activity_of(trace, args.predictions)
    latency = Latency.of(costs, expert_bytes, trace.top_k)
    chosen = configure(layers_of(activity), float(capacity), latency, args.zeta)
    return {
        "slots": [each.budget for each in chosen],
        "split": [each.ratio for each in chosen],
    }


def machine_costs(args: argparse.Namespace, trace: Trace) -> tuple[Costs | None, int]:
    """(what the machine of the profile takes, an expert's bytes); None without a profile."""
    if args.machine is None:
        return None, 0
    from greenroom.cli.doctor import default_profile
    from greenroom.core.machine import Machine

    machine = Machine.load(default_profile() if args.machine == "auto" else args.machine)
    expert = size(args, trace, "expert_bytes")
    if not expert:
        raise UsageError(
            "the trace does not say how large an expert is: give --expert-bytes, such as 12MiB"
        )
    return machine.costs(expert, size(args, trace, "dense_bytes")), expert


def size(args: argparse.Namespace, trace: Trace, name: str) -> int:
    """Bytes from the option, else from the trace's meta, else 0."""
    given, option = getattr(args, name), f"--{name.replace('_', '-')}"
    if given is None:
        return int(trace.meta.get(name) or 0)
    amount = Amount.parse(given, option)
    if amount.nbytes is None:
        raise UsageError(f"{option} {given}: write bytes, as 12MiB")
    return amount.nbytes
