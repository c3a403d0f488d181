"""Share of the gap between LRU and OPT that knowledge of the next tokens' routing closes.

    python benchmarks/papers/known_routing.py --traces DIR [--tokens 0 1 2 4 8 16]

The policy (known_policy.py) knows the experts of the next --tokens tokens exactly. With 0 it is
next-use. The figures are bounds: what a predictor that is never wrong would gain. Requests 1, 3, 5,
... in stored order, at most --limit tokens of them; cells as in gap.py.
"""

from __future__ import annotations

import argparse

from common import MODELS, limit, options, table
from known_policy import foresighted_policy

from greenroom.core.policy import Policy
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.study.gap import gap_closed, half_of
from greenroom.trace import Trace, load, stream

SHARES = (20, 40, 60)


def row(trace: Trace, tokens: list[int]) -> list[str]:
    """The shares of the gap, one cell for each number of known tokens."""
    requests, experts = stream(trace, "natural"), int(trace.offsets[-1])

    def misses(chosen: Policy, percent: int) -> int:
        return replay(requests, trace.offsets, experts * percent // 100, chosen, pin="none").misses

    ends = {share: (misses(policy("lru"), share), misses(policy("opt"), share)) for share in SHARES}
    cells = []
    for count in tokens:
        gaps = [
            gap_closed(lru, misses(foresighted_policy(count), share), opt)
            for share, (lru, opt) in ends.items()
        ]
        cells.append(" / ".join(f"{100 * gap:.1f}" for gap in gaps))
        print(trace.tokens, count, cells[-1], flush=True)
    return cells


def main(args: argparse.Namespace) -> None:
    rows = []
    for model in args.models:
        trace = half_of(load(args.traces / f"{model}.npz"), "report").head(limit(args))
        rows.append([MODELS[model], *row(trace, args.tokens)])
    table(args, "known-routing", ["recording", *(f"{count} tokens" for count in args.tokens)], rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=10_000, models=["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    main(parser.parse_args())
