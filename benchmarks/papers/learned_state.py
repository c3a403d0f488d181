"""Misses of later runs whose policy starts with what an earlier run has taught it.

    python benchmarks/papers/learned_state.py --traces DIR [--policies next-use moe-infinity]

The earlier run serves requests 0, 2, 4, ... of a recording. The later runs serve requests 1, 3, 5,
... , --requests of them each, in stored order. Every later run starts with an empty cache, so the
table has the effect of learned state alone: `cold` are the misses of all later runs with an
untaught policy, `change` is what the state makes of them. Shared scope, natural order; all runs
have the same capacity (12.5, 25 and 50 % of the experts).
"""

from __future__ import annotations

import argparse

import numpy as np
from common import MODELS, limit, options, table

from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import load, stream

SHARES = (0.125, 0.25, 0.5)


def rows_of(args: argparse.Namespace, model: str, name: str) -> list[list[str]]:
    """A row for each length of later runs: misses of an untaught policy, and their change."""
    trace = load(args.traces / f"{model}.npz").head(limit(args))
    requests = np.arange(trace.requests)
    earlier = stream(trace.select(requests[::2]), "natural")
    rows, experts, chosen = [], int(trace.offsets[-1]), policy(name)
    for count in args.requests:
        parts = [requests[1::2][i : i + count] for i in range(0, trace.requests // 2, count)]
        later = [stream(trace.select(part), "natural") for part in parts if len(part) == count]
        cells = []
        for share in SHARES:
            capacity = int(experts * share)
            learned = replay(earlier, trace.offsets, capacity, chosen, learned={}).learned
            cold, taught = (
                sum(
                    replay(each, trace.offsets, capacity, chosen, learned=state).misses
                    for each in later
                )
                for state in (None, learned)
            )
            cells += [f"{cold:,}", f"{100 * (taught / max(cold, 1) - 1):+.1f} %"]
        rows.append([MODELS[model], name, f"{len(later)} of {count}", *cells])
    return rows


def main(args: argparse.Namespace) -> None:
    header = ["recording", "policy", "runs of requests"]
    for share in SHARES:
        header += [f"cold, {100 * share:g} %", "change"]
    rows = [row for m in args.models for p in args.policies for row in rows_of(args, m, p)]
    table(args, "learned-state", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=1_000_000, models=["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
    parser.add_argument(
        "--policies", nargs="+", default=["next-use", "moe-infinity"], metavar="NAME"
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 10], help="of a later run (default: 1 10)"
    )
    main(parser.parse_args())
