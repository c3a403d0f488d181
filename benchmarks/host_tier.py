"""Split experts and low-precision misses with a host tier: disk, host memory and device.

    python benchmarks/host_tier.py TRACE [TRACE ...] [--tokens 128] [--capacity 25%]
    python benchmarks/host_tier.py TRACE --bus 2,4 --disk 8 --host 25,50,100,128

An expert computes in 1 ms, a layer's other parts in 1 ms. An expert crosses the last link in --bus
ms, and is read from disk in --disk times as long, in four chunks by one lane each. --host is the
memory of the host tier, in percent of all experts' bytes: an int4 copy takes 28 % of its expert's,
so with copies 128 % hold everything. Mean TPOT in ms of the second half of the tokens, of LRU with
the predictor of --prefetch; the last column needs a recording with gate weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.transfers.tiers import least_host_slots
from greenroom.policies import policy
from greenroom.sim.approximation import BITS, STORED
from greenroom.sim.event_driven import EventOptions, simulate_events, split_pieces
from greenroom.sim.study import capacities
from greenroom.sim.table import text_table
from greenroom.trace import Trace, load, stream

EXPERT = 1 << 20
LOW = BITS["int4"] / STORED
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split 0.5": {"split": 0.5},
    "split 0.75": {"split": 0.75},
    "int4 0.4": {"config": SchedulerConfig(miss_precision="int4")},
}


def costs(bus: float, disk: float) -> Costs:
    """The costs of a machine whose last link carries an expert in `bus` ms."""
    links = tuple(Link(EXPERT / (ms * 1e-3), 0.0, 1) for ms in (bus * disk, bus))
    return Costs(links, Work.constant(1e-3), Work.constant(1e-3))


def cell(trace: Trace, capacity: int, machine: Costs, share: float, prefetch: str, way: Any) -> str:
    """Simulate one way at a share of host memory: mean TPOT in ms, share that was not exact."""
    experts = int(trace.offsets[-1])
    extra = LOW if "config" in way else 0.0
    host = min(experts, int(share * experts / (1 + extra)))
    if "split" in way and host < least_host_slots(split_pieces(trace, EXPERT, way["split"])):
        return "-"
    result = simulate_events(
        trace, stream(trace, "runtime"), capacity, policy("lru"), machine, EXPERT, prefetch,
        EventOptions(chunk_bytes=EXPERT // 4, host=host, **way),
    )  # fmt: skip
    gaps = result.times.gaps
    tpot = f"{1e3 * float(gaps[gaps.size // 2 :].mean()):.1f}"
    return f"{tpot} ({result.as_json()['inexact_share']:.0%})" if extra else tpot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="25%")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bus", default="2,4")
    parser.add_argument("--disk", type=float, default=8.0)
    parser.add_argument("--host", default="25,50,100,128")
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    args = parser.parse_args()
    for path in args.traces:
        trace, rows = load(path).head(args.tokens), []
        ways = {n: w for n, w in WAYS.items() if trace.weights is not None or "config" not in w}
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            for bus in map(float, args.bus.split(",")):
                for percent in args.host.split(","):
                    machine, share = costs(bus, args.disk), int(percent) / 100
                    each = [
                        cell(trace, capacity, machine, share, args.prefetch, way)
                        for way in ways.values()
                    ]
                    rows.append([str(capacity), f"{bus:g}", f"{percent} %", *each])
        print(f"{path.name}: {trace.tokens} tokens, disk {args.disk:g} times the last link")
        print(text_table(["slots", "bus", "host memory", *ways], rows), flush=True)


if __name__ == "__main__":
    main()
