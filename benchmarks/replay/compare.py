"""Simulated against measured time: the same requests, policy and capacity in both.

    python benchmarks/replay/compare.py bench-data/olmoe-8 olmoe-1b-7b.npz

The cost model is that of a short run: the time of a token with everything resident, that of its
experts, and the latency of a missing expert beyond its bytes' time on the link. Then sessions as in
speed.py are run and simulated: without prefetching the misses must be the same.
"""

from __future__ import annotations

import json
import statistics
from itertools import product
from typing import Any

import numpy as np
from rig import Rig, arguments
from speed import REACTIVE, USUAL, Session, run, sessions

from common import commit, machine, note, table  # isort: skip
from greenroom.core.cache.buffer import default_borrow_limit
from greenroom.core.cost import FREE, Costs
from greenroom.core.pieces import Pieces
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import choose
from greenroom.sim.clock import Clock
from greenroom.sim.event_driven import passes
from greenroom.trace.orders import stream


def simulated(
    rig: Rig, session: Session, capacity: int, costs: Costs, policy: str, variant: str
) -> tuple[float, float, int]:
    """Simulate a session; return (seconds, stall seconds, misses) of the counted passes.

    As in the measured run, filling the cache takes no time.
    """
    trace, offsets = session.trace, list(rig.catalog.offsets)
    layers, experts = len(offsets) - 1, offsets[-1]
    chunks = [len(rig.ram.chunks(expert)) for expert in range(experts)]
    foresight, ahead = None, 0
    if variant != REACTIVE:
        foresight = Foresight(rig.predictor(variant, trace), offsets)
        ahead = default_borrow_limit(trace.top_k)
    scheduler = Scheduler(
        Pieces.unsplit(offsets, [rig.expert_bytes] * layers, chunks), capacity,
        choose(policy, capacity, experts), lanes=costs.lanes, ahead=ahead,
    )  # fmt: skip
    clock, before = Clock(scheduler, FREE, foresight), (0.0, 0.0, 0)
    for number, (at, steps) in enumerate(passes(trace, stream(trace, "runtime"))):
        if at.first >= session.filling:
            clock.set_costs(costs)
        if number == session.first:
            before = clock.now, clock.stall, scheduler.counts.misses
        clock.begin(at)
        for step in steps:
            clock.run(step)
    return clock.now - before[0], clock.stall - before[1], scheduler.counts.misses - before[2]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(guard=False)
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    add("--bandwidths", type=float, nargs="+", default=[1, 2, 4], metavar="GB/s")
    add("--variants", nargs="+", default=USUAL, metavar="NAME",
        help=f"{REACTIVE}, and what --prefetch takes (default: {' '.join(USUAL)})")  # fmt: skip
    add("--tokens", type=int, default=20, help="of a request (default: %(default)s)")
    add("--settle", type=int, default=4, help="of them not counted (default: %(default)s)")
    add("--fill", type=int, default=2, help="requests before (default: %(default)s)")
    add("--repeats", type=int, default=2, help="sessions (default: %(default)s)")
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    resident = rig.resident()
    note(f"a token {resident[0] * 1e3:.0f} ms, its experts {resident[1] * 1e3:.0f} ms")
    rows, distances = [], []
    for bandwidth, share, variant in product(args.bandwidths, args.shares, args.variants):
        record = compare(rig, share, bandwidth * 1e9, variant, resident, args)
        note(json.dumps(record))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        distances.append(record["simulated_s"] / record["measured_s"] - 1)
        ms = {name: f"{record[name] * 1e3:.0f}" for name in record if name.endswith("_s")}
        rows.append((
            f"{share:.1%}", f"{bandwidth:g}", variant,
            f"{record['measured_misses']:.2%}", f"{record['simulated_misses']:.2%}",
            ms["measured_s"], ms["simulated_s"], f"{distances[-1]:+.1%}",
            ms["measured_stall_s"], ms["simulated_stall_s"],
        ))  # fmt: skip
    header = (
        "resident", "GB/s", "variant", "miss ratio", "simulated", "TPOT ms", "simulated",
        "distance", "stall ms", "simulated",
    )  # fmt: skip
    print(table(header, rows))
    off = [abs(distance) for distance in distances]
    print(f"\nTPOT: median distance {statistics.median(off):.1%}, most {max(off):.1%}.")


def compare(
    rig: Rig, share: float, bandwidth: float, variant: str, resident: Any, args: Any
) -> dict[str, Any]:
    """Measured and simulated means over the counted passes of all sessions."""
    capacity, costs = int(rig.catalog.experts * share), rig.costs(bandwidth, *resident)
    chosen = sessions(rig.trace, args.tokens, args.fill, args.settle, args.repeats)
    runs = [run(rig, session, capacity, bandwidth, args, variant) for session in chosen]
    sims = [simulated(rig, each, capacity, costs, args.policy, variant) for each in chosen]
    counted = sum(len(r["seconds"]) for r in runs)
    requests = sum(r["requests"] for r in runs)
    seconds, stall, missed = np.sum(sims, 0).tolist()
    return {
        "share": share, "capacity": capacity, "bandwidth": bandwidth, "variant": variant,
        "latency": costs.links[0].latency,
        "measured_misses": sum(r["misses"] for r in runs) / requests,
        "simulated_misses": missed / requests,
        "measured_s": sum(sum(r["seconds"]) for r in runs) / counted,
        "simulated_s": seconds / counted,
        "measured_stall_s": sum(r["stall_s"] for r in runs) / counted,
        "simulated_stall_s": stall / counted,
    }  # fmt: skip


if __name__ == "__main__":
    main()
