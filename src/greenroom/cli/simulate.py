"""`greenroom simulate TRACE`: what a trace would have missed, and how long it would have taken."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.output import check_target, write_whole
from greenroom.cli.progress import Progress
from greenroom.cli.systems import HELP as SYSTEM
from greenroom.cli.systems import simulated
from greenroom.cli.timing import timing
from greenroom.config import CO_COMPUTE
from greenroom.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from greenroom.core.pins import Pins
    from greenroom.sim.lesser import Lesser
    from greenroom.sim.sweep import Cell, Row, Study
    from greenroom.trace import Trace

HELP = "replay a trace against policies and capacities"
ORDERS, PINS = ("natural", "rounds", "runtime"), ("step", "none")
LESSER = ("miss_precision", "nested", "low_below", "low_share", "low_follow", "skip_below",
          "substitute_below")  # fmt: skip


def add_to(commands: Any) -> None:
    parser = commands.add_parser("simulate", help=HELP, description=HELP)
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a trace: safetensors, or npz")
    add("--policy", metavar="P[,P...]", help="who is evicted; auto is the default")
    add("--system", metavar="S[,S...]", help=SYSTEM)
    add("--capacity", required=True, metavar="N[,N...]", help="slots, or 25%% of all experts")
    add("--order", metavar="|".join(ORDERS),
        help="how the requests follow one another (default: natural; runtime with --machine,"
        " since times are those of real passes)")  # fmt: skip
    add("--scope", metavar="shared|per-layer|N,N,...|FILE",
        help="one cache for all layers, one a layer of equal size, or sizes as the numbers (one a"
        " layer) or the file of `greenroom trace budgets` say (default: shared)")  # fmt: skip
    add("--pin", default="step", metavar="|".join([*PINS, "FILE"]),
        help="whether the experts of a step are safe while it is served (default: %(default)s); the"
        " file of `greenroom trace hot` keeps its experts for good, too")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="of policies that draw lots (default: %(default)s)")  # fmt: skip
    add("--limit", type=int, metavar="TOKENS", help="only the trace's first tokens")
    add("--reset", action="store_true", help="begin every request with an empty cache")
    add("--ray", metavar="ADDRESS", help="run the cells on a Ray cluster; local starts one here")
    add("--json", action="store_true", help="print an object, or a list of them for several cells")
    add("--report", metavar="FILE", type=Path, help="write one HTML page with curves and tables")
    times = parser.add_argument_group("time")
    times.add_argument("--machine", metavar="FILE",
                       help="also say how long it takes on the machine of this profile, as"
                       " `greenroom doctor` writes it; auto is this machine's")  # fmt: skip
    times.add_argument("--expert-bytes", metavar="SIZE",
                       help="of one expert: 12MiB (default: what the trace says)")  # fmt: skip
    times.add_argument("--dense-bytes", metavar="SIZE",
                       help="of one layer without its experts (default: what the trace says, else"
                       " 0: such layers then take no time)")  # fmt: skip
    times.add_argument("--store", metavar="PLACE", help="where the experts wait (default: the"
                       " profile's first link begins there)")  # fmt: skip
    times.add_argument("--processor", metavar="NAME", help="what computes them (default: the"
                       " profile's first)")  # fmt: skip
    times.add_argument("--host-capacity", metavar="N", help="slots in host memory that keep experts"
                       " between the disk and a device, or 25%% of all experts (default: none)",
                       )  # fmt: skip
    times.add_argument("--devices", type=int, metavar="N", help="spread the experts over so many"
                       " alike processors, each with a last link of its own; --capacity is that of"
                       " all together (default: 1)")  # fmt: skip
    times.add_argument("--prefetch", metavar="NAME[:D][,...]", help="fetch experts before they are"
                       " asked for, by a predictor: markov, next-gate:2, oracle, ...; off"
                       " (default) among several is the run without, to compare with")  # fmt: skip
    times.add_argument("--split", metavar="SHARE|N,N,...|FILE", help="cut experts in two and keep"
                       " the top, this share of them, for all layers or for each, or as the file"
                       " of `greenroom trace budgets` says; --capacity is then memory of whole"
                       " experts")  # fmt: skip
    times.add_argument("--miss-precision", metavar="off|int8|int4",
                       help="serve misses of small gate weight from copies in this precision, as"
                       " a run does; experts are taken to be stored in 16 bits")  # fmt: skip
    times.add_argument("--nested", action="store_true", default=None, help="with --miss-precision"
                       " int4: experts are int8 and contain their copies")  # fmt: skip
    times.add_argument("--low-below", type=float, metavar="SHARE", help="with --miss-precision:"
                       " misses below this share of the gate weights (default: 0.4)")  # fmt: skip
    times.add_argument("--low-share", metavar="SHARE", help="with --miss-precision: share of the"
                       " cache's memory that copies have (default: 12.5%%)")  # fmt: skip
    times.add_argument("--low-follow", action="store_true", default=None, help="with"
                       " --miss-precision: the exact expert follows a copy that was used, while"
                       " the link is idle")  # fmt: skip
    times.add_argument("--skip-below", type=float, metavar="SHARE",
                       help="leave out misses below this share of the gate weights")  # fmt: skip
    times.add_argument(
        "--substitute-below",
        type=float,
        metavar="SHARE",
        help="replace misses below this share by an expert that is there",
    )
    times.add_argument("--co-compute", metavar="|".join(CO_COMPUTE),
                       help="have misses computed by the processor beside host memory too, where"
                       " that is sooner than to move them (default: off, and auto for systems"
                       " that do)")  # fmt: skip
    times.add_argument("--ahead", type=int, metavar="N", help="slots that prefetches may have at a"
                       " time, at most a quarter of all (default: as a run has it)")  # fmt: skip
    parser.show_first(
        "policy", "system", "capacity", "machine", "prefetch", "order", "limit", "json", "report"
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> None:
    check(args)
    if args.report is not None:
        check_target(args.report)
    with Progress(f"reading {args.trace}") as progress:
        page, rows, trace = _simulate(args, progress)
    _show(args, rows, trace)
    if page is not None:
        write_whole(args.report, page)
        print(f"report: {args.report}", file=sys.stderr)


def _simulate(args: argparse.Namespace, progress: Progress) -> tuple[str | None, list[Row], Trace]:
    """(the report's page, if one is wanted; the rows; the trace)."""
    from greenroom.plan.systems import systems
    from greenroom.policies import policy
    from greenroom.sim.sweep import Cell, capacities, names
    from greenroom.trace import load

    policies = names(args.policy) if args.policy is not None else []
    for name in policies:
        policy(name)
    if args.system is not None:
        systems(args.system)
    trace = load(args.trace)
    if args.limit is not None:
        trace = trace.head(args.limit)
    slots = capacities(args.capacity, int(trace.offsets[-1]))
    ahead = predictors(args, trace)
    if args.system is not None:
        study = _study(args, trace)
        rows = simulated(args, study, slots, lambda s, c: run(args, s, c, progress)[0])
        return None, rows, trace
    cells = [
        Cell(name, capacity, "step" if args.pin not in PINS else args.pin, prefetch)
        for name in policies
        for capacity in slots
        for prefetch in ahead
    ]
    rows, page = run(args, _study(args, trace), cells, progress)
    return page, rows, trace


def _study(args: argparse.Namespace, trace: Trace) -> Study:
    """What all cells share."""
    from greenroom.config import scope_of, split_of
    from greenroom.sim.sweep import Study

    return Study.of(
        trace, args.order, scope=scope_of(args.scope or "shared"), seed=args.seed,
        reset=args.reset, ahead=args.ahead, pins=_pins(args, trace),
        split=split_of(args.split or "off"), lesser=lesser_of(args, trace), **timing(args, trace),
    )  # fmt: skip


def lesser_of(args: argparse.Namespace, trace: Trace) -> Lesser | None:
    """What misses may be served with; None where all is exact."""
    from greenroom.core.precision import Thresholds
    from greenroom.sim.lesser import Lesser, check_weights

    at, share = thresholds(args)
    if not any(at):
        return None
    check_weights(trace)
    precision = args.miss_precision or "off"
    follow = bool(args.low_follow)
    return Lesser.of(Thresholds(*at, follow=follow), precision, share, nested=bool(args.nested))


def thresholds(args: argparse.Namespace) -> tuple[tuple[float, float, float], float]:
    """(tails below which misses get less, the copies' share of the cache), checked."""
    from greenroom.config import LOW_SHARE, PRECISIONS, share_of, thresholds_of

    precision = args.miss_precision or "off"
    if precision not in PRECISIONS:
        raise UnknownName("miss precision", precision, PRECISIONS)
    if args.nested and precision != "int4":
        raise UsageError("--nested is for --miss-precision int4: int8 experts contain such copies")
    at = thresholds_of(
        precision, args.low_below, args.skip_below or 0.0, args.substitute_below or 0.0
    )
    if precision == "off" and args.low_share is not None:
        raise UsageError("--low-share is for --miss-precision, which is off: give both")
    if precision == "off" and args.low_follow:
        raise UsageError("--low-follow is for --miss-precision, which is off: give both")
    return at, share_of(args.low_share or LOW_SHARE, "--low-share")


def _pins(args: argparse.Namespace, trace: Trace) -> Pins | None:
    """The experts that stay, where a file says so."""
    from greenroom.core.pins import Pins

    if args.pin in PINS:
        return None
    if args.order != "runtime" or args.machine is not None:
        raise UsageError("--pin FILE is about misses of real passes: give --order runtime, and no"
                         " --machine")  # fmt: skip
    return Pins.load(args.pin, trace.offsets.tolist())


def _show(args: argparse.Namespace, rows: list[Row], trace: Trace) -> None:
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    print(table(rows, trace))
    for row in rows:
        if row.get("without"):
            print(f"{row['system']}: without {'; '.join(row['without'])}", file=sys.stderr)


def check(args: argparse.Namespace) -> None:
    """What can be said before anything heavy is imported; fills in the order's default."""
    if args.order is None:
        args.order = "runtime" if args.machine else "natural"
    if args.co_compute not in (None, *CO_COMPUTE):
        raise UnknownName("co-compute", args.co_compute, CO_COMPUTE)
    if args.order not in ORDERS:
        raise UnknownName("order", args.order, ORDERS)
    if args.pin not in PINS and not (Path(args.pin).suffix == ".json" or Path(args.pin).is_file()):
        raise UnknownName("pin", args.pin, [*PINS, "FILE"])
    from greenroom.config import scope_of, split_of

    scope_of(args.scope or "shared")
    if split_of(args.split or "off") == "auto":
        raise UsageError(
            "--split auto is set by what runs record: give simulate a share, or a file"
        )
    thresholds(args)
    if args.policy is None and args.system is None:
        raise UsageError("say who is evicted: --policy lru,auto, or --system llru,greenroom")
    if args.system is not None and args.policy is not None and "," in args.policy:
        raise UsageError("--policy beside --system overrides the policy of every row: give one")
    if args.system is not None and args.report is not None:
        raise UsageError("--report draws curves of policies: leave out --system")
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be at least 1 token, got {args.limit}")
    if args.machine is None:
        for name in ("host_capacity", "devices", "co_compute", "prefetch", "ahead", "split",
                     "expert_bytes", "dense_bytes", "store", "processor", *LESSER):  # fmt: skip
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of use with --machine only")
    elif args.order != "runtime":
        raise UsageError("--machine times real passes: leave out --order, or give --order runtime")
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"--devices must be at least 1, got {args.devices}")
    if args.ahead is not None and args.ahead < 1:
        raise UsageError(f"--ahead must be at least 1 slot, got {args.ahead}")
    if args.ahead is not None and args.prefetch is None:
        raise UsageError("--ahead is of use with --prefetch only")


def predictors(args: argparse.Namespace, trace: Trace) -> list[str]:
    """Those that were asked for, each of them tried on the trace before anything takes long."""
    from greenroom.sim.proactive import automatic, foresight_of
    from greenroom.sim.sweep import OFF, names

    if args.prefetch is None:
        return [OFF]
    found = [automatic(trace) if name == "auto" else name for name in names(args.prefetch)]
    for name in found:
        if name != OFF:
            foresight_of(trace, name, args.seed)
    return list(dict.fromkeys(found))


def run(
    args: argparse.Namespace, study: Study, cells: list[Cell], progress: Progress
) -> tuple[list[Row], str | None]:
    """The rows of the cells, and the report's page if one is wanted."""
    from greenroom.sim.sweep import sweep, sweep_on_ray

    def go(study: Study, cells: list[Cell], what: str) -> list[Row]:
        count = 0

        def done() -> None:
            nonlocal count
            count += 1
            progress.say(f"simulating {what}", count, len(cells))

        def compiling(name: str, number: int, of: int) -> None:
            progress.say(f"compiling {name}, policy {number + 1} of {of}")

        if args.ray is not None:
            progress.say(f"simulating {what} on Ray", 0, len(cells))
            return sweep_on_ray(study, cells, args.ray, done)
        return sweep(study, cells, done=done, compiling=compiling)

    rows = go(study, cells, f"{len(cells)} cells")
    if args.report is None:
        return rows, None
    from greenroom.cli.page import page

    return rows, page(
        args, study, cells, rows, lambda s, c: go(s, c, f"{len(c)} cells of the curves")
    )


def command(args: argparse.Namespace) -> str:
    """The command that gives the same again, with every default said."""
    words = ["greenroom", "simulate", str(args.trace)]
    for name in ("policy", "system", "capacity", "order", "scope", "pin", "seed", "limit",
                 "machine",
                 "expert_bytes", "dense_bytes", "store", "processor", "host_capacity", "devices",
                 "co_compute", "prefetch", "split", "ahead", *LESSER, "ray",
                 "report"):  # fmt: skip
        value = getattr(args, name)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, *["--reset"] * args.reset, *["--json"] * args.json])


def table(rows: list[Row], trace: Trace) -> str:
    """The rows for people."""
    from greenroom.cli.output import columns

    experts, first = int(trace.offsets[-1]), rows[0]
    ahead = any("prefetches" in row for row in rows)
    inexact = any("inexact_share" in row for row in rows)
    named = "system" in first
    header = [
        *["system"] * named,
        "policy",
        *["prefetch"] * ahead,
        "capacity",
        "requests",
        "misses",
        "miss ratio",
    ]
    if "seconds" in first:
        header += ["TTFT", "TPOT", "TPOT p95", "tokens/s", "stalled"]
    if ahead:
        header += ["accuracy", "prefetches", "useful", "late", "wasted"]
    header += ["inexact"] * inexact
    lines = [_line(row, experts, ahead, inexact) for row in rows]
    return (
        f"{trace.meta.get('model', 'trace')}: {trace.tokens:,} tokens of {trace.requests:,}"
        f" requests, {experts:,} experts in {trace.layers} layers, top-{trace.top_k}\n"
        f"order {first['order']}, scope {first['scope']}, pin {first['pin']}\n\n"
        + columns(header, lines, left=1 + ahead + named)
    )


def _line(row: Row, experts: int, ahead: bool, inexact: bool) -> list[str]:
    """A row of the table; `ahead`: with what became of the prefetches, as shares of them;
    `inexact`: with the share of evaluations that were."""
    from greenroom.sim.report import show_time

    def share(part: float | None, of: float = 1.0) -> str:
        return "-" if part is None or not of else f"{part / of:.0%}"

    line = [
        *([row["system"]] if "system" in row else []),
        row["policy"],
        *[row.get("prefetch", "")] * ahead,
        f"{row['capacity']:,} ({row['capacity'] / experts:.0%})",
        f"{row['requests']:,}",
        f"{row['misses']:,}",
        f"{row['miss_ratio']:.2%}",
    ]
    if "seconds" in row:
        times, rate = (
            [row[name] for name in ("ttft_s", "tpot_s", "tpot_p95_s")],
            row["tokens_per_s"],
        )
        line += ["-" if seconds is None else show_time(seconds) for seconds in times]
        line += ["-" if rate is None else f"{rate:.3g}", share(row["stall_s"], row["seconds"])]
    if ahead:
        begun = row.get("prefetches", 0)
        ends = [share(row.get(name), begun) for name in ("useful", "late", "wasted")]
        line += [share(row.get("accuracy")), f"{begun:,}", *ends]
    if inexact:
        line.append(f"{row.get('inexact_share', 0.0):.1%}")
    return line
