"""MoEpic's tau: budgets of layers from Algorithm 1 every so many tokens, simulated.

    python benchmarks/papers/moepic_tau.py --traces DIR [--models NAME ...] [--tokens 1500]

As `run --split auto` without history: whole experts and equal budgets first, then Algorithm 1
divides the slots among the layers after every tau tokens, between two requests. The machine is that
of benchmarks/split.py with --ratio ms for the transfer of an expert; LCP, and an oracle that is
right in 8 of 10 guesses. Mean TPOT in ms of the tokens of the second half, and misses of all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # after this folder: both have a common.py

from moepic import ms, timed
from split import EXPERT, costs

from common import options, percent, table  # isort: skip
from greenroom.plan.configurator import Division, TokenLatency
from greenroom.sim.study import capacities
from greenroom.trace import load


def main(args: argparse.Namespace) -> None:
    rows, machine = [], costs(args.ratio)
    tokens = 300 if args.quick else args.tokens
    taus = [0, *(tokens // part for part in (2, 4, 12))]
    for model in args.models:
        trace = load(args.traces / f"{model}.npz").head(tokens)
        latency = TokenLatency.of(machine, EXPERT, trace.top_k)
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            divide = Division.of(capacity, latency, trace.layers, None)
            for tau in taus:
                result = timed(
                    trace, capacity, machine, args.prefetch, "lcp", args.seed,
                    scope="per-layer", tau=tau, divide=divide,
                )  # fmt: skip
                gaps = result.times.gaps
                rows.append([
                    model, capacity, tau or "never", ms(gaps[gaps.size // 2 :].mean()),
                    percent(result.times.misses / result.times.requests),
                ])  # fmt: skip
    header = ["recording", "slots", "tau", "TPOT ms, second half", "misses"]
    table(args, "moepic-tau", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b", "mixtral-8x7b"])
    parser.add_argument("--capacity", default="25%,50%")
    parser.add_argument("--ratio", type=float, default=4.0, help="transfer / compute")
    parser.add_argument("--tokens", type=int, default=1500, help="of each recording")
    parser.add_argument("--prefetch", default="noisy-oracle:accuracy=0.8")
    main(parser.parse_args())
