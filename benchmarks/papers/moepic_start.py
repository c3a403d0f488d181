"""MoEpic's first cache configuration (Algorithm 1, line 4) against two others, simulated.

    python benchmarks/papers/moepic_start.py --traces DIR [--models NAME ...] [--capacity 25%,50%]

Without counts Algorithm 1 has nothing to start from. The paper begins with equal budgets and cuts
every expert in the middle. The others are equal budgets with whole experts, and Algorithm 1 on the
synthetic workload that plans use (`plan/workload.py`). The machine is that of benchmarks/split.py:
an expert computes in 1 ms, the rest of a layer in 1 ms, and an expert is moved in --ratios ms. The
cache begins empty, with LCP and an oracle that is right in 8 of 10 guesses. Mean TPOT in ms.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # after this folder: both have a common.py

from moepic import ms, timed, ways
from split import EXPERT, costs

from common import options, table  # isort: skip
from greenroom.plan.configurator import TokenLatency, configure, layer_statistics
from greenroom.plan.sizing import predicted_activity
from greenroom.plan.workload import synthetic_trace
from greenroom.sim.study import capacities
from greenroom.trace import load


def main(args: argparse.Namespace) -> None:
    rows = []
    for model in args.models:
        trace = load(args.traces / f"{model}.npz").head(100 if args.quick else args.tokens)
        synthetic = synthetic_trace(trace.experts_per_layer.tolist(), trace.top_k)
        layers = layer_statistics(predicted_activity(synthetic, args.prefetch))
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            for ratio in map(float, args.ratios.split(",")):
                machine = costs(ratio)
                latency = TokenLatency.of(machine, EXPERT, trace.top_k)
                chosen = configure(layers, float(capacity), latency)
                times = [
                    timed(trace, capacity, machine, args.prefetch, "lcp", args.seed, **way)
                    for way in (
                        {"scope": "per-layer", "split": 0.5},
                        {"scope": "per-layer"},
                        ways(chosen),
                    )
                ]
                thetas = [c.ratio for c in chosen]
                rows.append([
                    model, capacity, f"{ratio:g}", *(ms(each.times.gaps.mean()) for each in times),
                    f"{min(thetas):.2f} to {max(thetas):.2f}",
                ])  # fmt: skip
    header = ["recording", "slots", "transfer / compute", "halves", "unsplit", "synthetic", "theta"]
    table(args, "moepic-start", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b", "mixtral-8x7b"])
    parser.add_argument("--capacity", default="25%,50%")
    parser.add_argument("--ratios", default="1,2,4", help="transfer / compute")
    parser.add_argument("--tokens", type=int, default=300, help="timed (100 with --quick)")
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    main(parser.parse_args())
