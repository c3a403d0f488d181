"""Pinned sets of tasks compared with no pinning, on recordings of real models.

    python benchmarks/pins.py TRACE [TRACE ...] [--capacity 12.5%,25%,50%] [--share 5%]

Sets are made from requests 0, 2, 4, ... of a trace; requests 1, 3, 5, ... are replayed in order
runtime, and their misses counted. `label`: each request keeps its own label's set from its start,
as if the task were known; `prompt`: the set that is nearest to the request's first tokens; `mixed`:
one set, of all requests together, for good.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from greenroom.core.cache.pins import Pins
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.policies import policy
from greenroom.sim.pinned import hot_experts, pinned_by_step
from greenroom.sim.replay import replay
from greenroom.sim.study import capacities
from greenroom.sim.table import text_table
from greenroom.trace import Trace, load, stream


def by_label(trace: Trace, requests: Stream, pins: Pins) -> list[tuple[int, Ints]]:
    """Pin the experts of each request's own label from its first step on."""
    firsts = np.searchsorted(requests.request, np.arange(trace.requests))
    return [(int(s), pins.tasks[trace.labels[r]].experts) for r, s in enumerate(firsts)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="12.5%,25%,50%")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--policy", default="lru,auto")
    args = parser.parse_args()
    for path in args.traces:
        trace = load(path)
        training, timed = (trace.select(np.arange(i, trace.requests, 2)) for i in (0, 1))
        shared = sorted({*training.labels} & {*timed.labels})
        if not shared:
            sys.exit(f"{path}: no label has requests in both halves of the recording")
        chosen = [r for r, label in enumerate(timed.labels) if label in shared]
        timed = timed.select(np.array(chosen))
        requests = stream(timed, "runtime")
        pins = hot_experts(training, shared, args.share)
        mixed = hot_experts(
            replace(training, labels=("all",) * training.requests), ["all"], args.share
        )
        sets = {
            "none": [],
            "label": by_label(timed, requests, pins),
            "prompt": pinned_by_step(timed, requests, pins),
            "mixed": pinned_by_step(timed, requests, mixed),
        }
        rows = []
        for name in args.policy.split(","):
            for capacity in capacities(args.capacity, int(trace.offsets[-1])):
                results = {
                    way: replay(
                        requests, trace.offsets, capacity, policy(name), pinned=stay
                    ).miss_ratio
                    for way, stay in sets.items()
                }
                rows.append([
                    name, str(capacity), f"{results['none']:.2%}",
                    *(f"{results[w]:.2%} ({results[w] / results['none'] - 1:+.1%})" for w in sets
                      if w != "none"),
                ])  # fmt: skip
        kinds = f"{len(shared)} labels, {pins.tasks[shared[0]].experts.size} experts pinned"
        print(f"{path.name}: {timed.requests} requests, {kinds}")
        print(text_table(["policy", "slots", *sets], rows), flush=True)


if __name__ == "__main__":
    main()
