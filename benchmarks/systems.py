"""Every named system, as its paper has it and with Greenroom's rules, simulated on recordings.

    python benchmarks/systems.py TRACE [TRACE ...] [--capacity 25%] [--tokens 400]
    python benchmarks/systems.py TRACE --machine FILE --processor gpu

Without --machine, a built-in example: experts of the size that the recording says (else 12 MiB)
in host memory, all of them; a bus of 25 GB/s, a GPU that reads an expert at 1 TB/s, a CPU that
reads it at --host GB/s, and 0.3 ms for the rest of a layer. As `greenroom simulate --system` plays
them: predictors that run beside a model are replayed from the recording's predictions, else by a
noisy oracle with the accuracy that they have on the demo model. `NAME+greenroom` prefetches only
what is expected to save time, and only while tokens are faster.

All rows are timed on the same requests, from an empty cache, and have had the same requests before
(--earlier tokens): from these their policies and predictors have learned, and layer sizes, splits
and chosen sets follow from them. Missing parts are listed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from greenroom.core.config.base import VALUE
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.machine import Machine
from greenroom.plan.systems.cells import simulate_systems
from greenroom.plan.systems.table import GREENROOM, SYSTEMS, system
from greenroom.predictors import OFF
from greenroom.sim.study import Row, Study, capacities
from greenroom.sim.sweep import sweep
from greenroom.sim.table import text_table
from greenroom.trace import Trace, load

BUS, GPU, LAYER_S, EXPERT = 25e9, 1e12, 3e-4, 12 << 20
SPLIT = "moepic"
UNGATED = [row.name for row in SYSTEMS.values() if row.prefetch != OFF and row.rule != VALUE]
NAMES = [*SYSTEMS, *(name + GREENROOM for name in UNGATED)]


def machine_of(args: argparse.Namespace, nbytes: int) -> Costs:
    """The costs of the requested machine."""
    if args.machine is not None:
        return Machine.load(args.machine).costs(nbytes, processor=args.processor)
    per_token = nbytes / (args.host * 1e9)
    work = Work(((1, per_token), (4, 1.5 * per_token), (64, 12 * per_token)))
    return Costs(
        (Link(1e12, 0.0, 2), Link(BUS, 1e-5, 2)), Work.constant(nbytes / GPU),
        Work.constant(LAYER_S), host=work,
    )  # fmt: skip


def parts_of(path: Path, earlier: int, tokens: int) -> tuple[Trace, Trace]:
    """The requests of a recording's first `earlier` tokens, and of `tokens` tokens after them."""
    recording = load(path).head(earlier + tokens)
    first = int(np.searchsorted(recording.request_starts, earlier))
    return (
        recording.select(np.arange(first)), recording.select(np.arange(first, recording.requests))
    )  # fmt: skip


def rows_of(args: argparse.Namespace, path: Path) -> list[Row]:
    """Simulate each system on the later requests of a recording, which knows earlier ones."""
    earlier, trace = parts_of(path, args.earlier, args.tokens)
    nbytes = int(trace.meta.get("expert_bytes") or EXPERT)
    costs, experts = machine_of(args, nbytes), int(trace.offsets[-1])
    study = Study.of(trace, "runtime", costs=costs, expert_bytes=nbytes, host=experts)
    rows: list[Row] = []
    for capacity in capacities(args.capacity, experts):
        for name in args.systems.split(","):
            own_study = study
            if (
                name.removesuffix(GREENROOM) == SPLIT
            ):  # split experts have no tier in host memory: theirs is the store
                bus = replace(costs, links=costs.links[-1:], host=None)
                own_study = replace(study, host=0, costs=bus)
            rows += simulate_systems([system(name)], {}, own_study, [capacity], sweep, earlier)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="25%")
    parser.add_argument("--tokens", type=int, default=400, help="of the timed requests")
    parser.add_argument("--earlier", type=int, default=1600, help="of the requests before")
    parser.add_argument("--systems", default=",".join(NAMES))
    parser.add_argument("--host", type=float, default=40.0, metavar="GB/s")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--processor", default=None)
    args = parser.parse_args()
    for path in args.traces:
        rows_found = rows_of(args, path)
        base = {row["capacity"]: row for row in rows_found if row["system"] == "llru"}
        lines = []
        for row in rows_found:
            llru = base.get(row["capacity"])
            lines.append([
                row["system"], str(row["capacity"]), f"{row['miss_ratio']:.1%}",
                f"{1e3 * row['tpot_mean_s']:.1f}", f"{1e3 * (row['ttft_mean_s'] or np.nan):.0f}",
                f"{row['tpot_mean_s'] / llru['tpot_mean_s']:.2f}" if llru else "-",
                str(row.get("on_host", "-")), f"{row['stall_s'] / row['seconds']:.0%}",
            ])  # fmt: skip
        header = ["system", "slots", "miss ratio", "TPOT ms", "TTFT ms", "of llru", "on the host",
                  "stalled"]  # fmt: skip
        print(
            f"{path.name}: {args.tokens} tokens after {args.earlier}\n\n"
            f"{text_table(header, lines)}\n",
            flush=True,
        )
        for row in rows_found:
            if row["without"]:
                print(f"{row['system']}: without {'; '.join(row['without'])}")
        print()


if __name__ == "__main__":
    main()
