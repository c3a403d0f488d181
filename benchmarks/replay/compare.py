"""Simulated against measured: the same requests, policy and capacity in a run and a simulation.

    python benchmarks/replay/compare.py bench-data/olmoe-8 olmoe-1b-7b.npz

The cost model is that of a short run: what a token takes with everything resident, its experts
apart, and what a missing expert takes beyond its bytes' time on the line. Then sessions as in
speed.py are run and simulated: misses must be the same, times should be.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
from rig import Rig, arguments
from speed import Session, run, sessions

from common import commit, machine, note, table  # isort: skip
from greenroom.core.cost import Costs
from greenroom.policies import choose
from greenroom.sim.timed import times
from greenroom.trace.orders import stream


def simulated(rig: Rig, session: Session, capacity: int, costs: Costs, policy: str) -> Any:
    """(seconds of the counted passes, stall of them, misses of them) in simulated time.

    The whole session less its uncounted beginning: what comes before is the same in both.
    """

    def upto(passes: int) -> tuple[float, float, int]:
        trace = session.trace.head(passes)
        found = times(
            trace, stream(trace, "runtime"), capacity,
            choose(policy, capacity, rig.catalog.experts), costs, rig.expert_bytes,
        )  # fmt: skip
        return found.seconds, found.stall, found.misses

    whole, before = upto(session.trace.passes), upto(session.first)
    return tuple(a - b for a, b in zip(whole, before, strict=True))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    add("--bandwidths", type=float, nargs="+", default=[1, 2, 4], metavar="GB/s")
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
    for bandwidth in (each * 1e9 for each in args.bandwidths):
        costs = rig.costs(bandwidth, *resident)
        for share in args.shares:
            capacity = int(rig.catalog.experts * share)
            record = compare(rig, capacity, bandwidth, costs, args)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            distance = record["simulated_s"] / record["measured_s"] - 1
            distances.append(abs(distance))
            rows.append((
                f"{share:.1%}", f"{bandwidth / 1e9:g}",
                *(f"{record[name]:.2%}" for name in ("measured_misses", "simulated_misses")),
                *(f"{record[name] * 1e3:.0f}" for name in ("measured_s", "simulated_s")),
                f"{distance:+.1%}",
                f"{record['measured_stall_s'] * 1e3:.0f}",
                f"{record['simulated_stall_s'] * 1e3:.0f}",
            ))  # fmt: skip
    print(table(
        ("resident", "GB/s", "miss ratio", "simulated", "TPOT ms", "simulated", "distance",
         "stall ms", "simulated"), rows,
    ))  # fmt: skip
    print(f"\nTPOT: median distance {statistics.median(distances):.1%}, most {max(distances):.1%}.")


def compare(rig: Rig, capacity: int, bandwidth: float, costs: Costs, args: Any) -> dict[str, Any]:
    """Measured and simulated means over the counted passes of all sessions."""
    chosen = sessions(rig.trace, args.tokens, args.fill, args.settle, args.repeats)
    runs = [run(rig, session, capacity, bandwidth, args, "reactive") for session in chosen]
    sims = np.array([simulated(rig, session, capacity, costs, args.policy) for session in chosen])
    passes = sum(len(r["seconds"]) for r in runs)
    requests = sum(r["requests"] for r in runs)
    seconds, stall, missed = sims.sum(0).tolist()
    return {
        "capacity": capacity, "bandwidth": bandwidth,
        "latency": costs.links[0].latency,
        "measured_misses": sum(r["misses"] for r in runs) / requests,
        "simulated_misses": missed / requests,
        "measured_s": sum(sum(r["seconds"]) for r in runs) / passes,
        "simulated_s": seconds / passes,
        "measured_stall_s": sum(r["stall_s"] for r in runs) / passes,
        "simulated_stall_s": stall / passes,
    }  # fmt: skip


if __name__ == "__main__":
    main()
