"""Split against unsplit experts, simulated at set ratios of transfer to compute.

    python benchmarks/split.py TRACE [TRACE ...] [--capacity 12.5%,25%,50%] [--tokens 400]
    python benchmarks/split.py TRACE --ratios 0.5,1,2

An expert computes in 1 ms, a layer's other parts in 1 ms, and an expert is carried in --ratios
ms by one lane, in four chunks. The first half of the tokens is what Algorithm 1 and the
budgets are made of, the second half is timed, from an empty cache; all have the same memory. Median
TPOT in ms, of LRU; a predictor of `--prefetch` (default: a noisy oracle that is right in 8 of 10)
fetches ahead, or nothing does (off).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.core.cost import Costs, Link, Work
from greenroom.plan.configurator import TokenLatency, configure, layer_statistics
from greenroom.plan.sizing import predicted_activity, slots_with_fewest_misses
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.study import capacities
from greenroom.sim.table import text_table
from greenroom.trace import Trace, load, stream

EXPERT, CHUNK = 1 << 20, 1 << 18
SHARES = (0.25, 0.5, 0.75)


def costs(ratio: float) -> Costs:
    """The costs of a machine whose link carries an expert in `ratio` ms."""
    link = Link(EXPERT / (ratio * 1e-3), 0.0, 1)
    return Costs((link,), Work.constant(1e-3), Work.constant(1e-3))


def halves(path: Path, tokens: int) -> tuple[Trace, Trace]:
    """The requests of a recording's first `tokens` tokens, and of as many tokens after them."""
    recording = load(path).head(2 * tokens)
    half = np.searchsorted(recording.request_starts, tokens)
    return recording.select(np.arange(half)), recording.select(np.arange(half, recording.requests))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--capacity", default="12.5%,25%,50%")
    parser.add_argument("--ratios", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    args = parser.parse_args()
    for path in args.traces:
        training, timed = halves(path, args.tokens)
        requests = stream(timed, "runtime")
        before = stream(training, "runtime")
        layers = layer_statistics(predicted_activity(training, args.prefetch))
        rows = []
        for capacity in capacities(args.capacity, int(timed.offsets[-1])):
            for ratio in map(float, args.ratios.split(",")):
                machine = costs(ratio)
                latency = TokenLatency.of(machine, EXPERT, timed.top_k)
                chosen = configure(layers, float(capacity), latency)
                ways: dict[str, dict[str, Any]] = {
                    "shared": {},
                    "per-layer": {"scope": "per-layer"},
                    "budgets": {
                        "scope": slots_with_fewest_misses(before, training.offsets, capacity)
                    },
                    **{f"split {share}": {"split": share} for share in SHARES},
                    "moepic": {"scope": tuple(c.budget for c in chosen)},
                }
                if any(round(8 * c.ratio) < 8 for c in chosen):
                    ways["moepic"]["split"] = tuple(c.ratio for c in chosen)
                cells = []
                for way in ways.values():
                    result = simulate_events(
                        timed, requests, capacity, policy("lru"), machine, EXPERT,
                        args.prefetch, EventOptions(chunk_bytes=CHUNK, **way),
                    )  # fmt: skip
                    cells.append(f"{1e3 * float(np.median(result.times.gaps)):.1f}")
                mean = float(np.mean([c.ratio for c in chosen]))
                rows.append([str(capacity), f"{ratio:g}", *cells, f"{mean:.2f}"])
        print(f"{path.name}: {timed.tokens} tokens, prefetch {args.prefetch}")
        header = ["slots", "transfer/compute", *ways, "mean theta"]
        print(text_table(header, rows), flush=True)


if __name__ == "__main__":
    main()
