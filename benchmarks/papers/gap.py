"""Share of the gap between LRU and OPT that each policy closes on held-out requests.

    python benchmarks/papers/gap.py --traces DIR [--models NAME ...] [--policies "auto;llru"]

Requests 0, 2, 4, ... of a trace are for tuning (`--half tuning`), 1, 3, 5, ... are reported, the
first --limit tokens of them. Shared scope, natural order, 20, 40 and 60 % of all experts; requests
as stored and in two orders shuffled by --seed.

    gap closed = (LRU's misses - the policy's) / (LRU's misses - OPT's)

With `--learned`, a policy that learns for later runs starts with what it has learned from requests
0, 2, 4, ... in stored order, at the same capacity; the cache is empty. With `--trained`, `next-use`
also has a network that was trained on these requests, as `greenroom train-policy` does (minutes a
trace). LRU is pinned as the policy
is; OPT, the floor of everything, is not. A policy that must know the trace beforehand is left out.
Cells are means over the request orders.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

import numpy as np
from common import limit, options, table

from greenroom.core.pieces import Ints
from greenroom.core.policy import Arrays
from greenroom.core.stream import Stream
from greenroom.policies import POLICIES, policy
from greenroom.sim.replay import replay
from greenroom.study.gap import gap_closed, half_of
from greenroom.trace import load, stream

SHARES = (20, 40, 60)
Cell = tuple[str, int, str]  # trace, % of all experts, pin


def measure(path: Path, args: argparse.Namespace, gaps: dict[str, dict[Cell, list[float]]]) -> None:
    """Add each policy's share of the gap, once for each order of the requests."""
    recording = load(path)
    experts = int(recording.offsets[-1])
    shuffles = [args.seed + n for n in range(1, args.orders)]
    for seed in [None] if args.quick else [None, *shuffles]:
        trace = half_of(recording, args.half, seed)
        requests = stream(trace.head(limit(args)), "natural")
        earlier = stream(half_of(recording, "tuning"), "natural") if args.learned else None
        trained = trained_network(args.traces, path.stem) if args.trained else {}
        for share in SHARES:
            misses = partial(
                _misses, requests, earlier, trained, recording.offsets, args.seed,
                experts * share // 100,
            )  # fmt: skip
            floor = misses("opt", "none")
            for pin in args.pin:
                lru = misses("lru", pin)
                for name in args.policies:
                    gap = gap_closed(lru, misses(name, pin), floor)
                    gaps[name][path.stem, share, pin].append(gap)
                    where = f"{path.stem} {share} % pin {pin} order {seed or 'stored'}"
                    print(f"{where}: {name} {gap:.1%}", file=sys.stderr, flush=True)


def _misses(
    requests: Stream,
    earlier: Stream | None,
    trained: Arrays,
    offsets: Ints,
    seed: int,
    capacity: int,
    name: str,
    pin: str,
) -> int:
    chosen, learned = policy(name), None
    if earlier is not None and chosen.learning is not None:
        learned = replay(earlier, offsets, capacity, chosen, pin=pin, seed=seed, learned={}).learned
        if learned is not None and name.partition(":")[0] == "next-use":
            learned = {**learned, **trained}
    return replay(requests, offsets, capacity, chosen, pin=pin, seed=seed, learned=learned).misses


@cache
def trained_network(traces: Path, model: str) -> Arrays:
    """Return the network of `next-use`, trained on a trace's tuning requests."""
    from greenroom.config import TrainPolicyConfig
    from greenroom.policies.helpers.next_use_network import PREFIX
    from greenroom.runtime.recording.policy_training import train_policy

    recording = load(traces / f"{model}.npz")
    requests = stream(half_of(recording, "tuning"), "natural")
    config = TrainPolicyConfig()
    arrays = train_policy(
        requests, recording.offsets, config,
        lambda done: print(f"{model}: {done} of {config.epochs} epochs", file=sys.stderr),
    )  # fmt: skip
    return {name: array for name, array in arrays.items() if name.startswith(PREFIX)}


def rows_of(
    gaps: dict[str, dict[Cell, list[float]]], pin: str, traces: list[str]
) -> list[list[str]]:
    """A row a policy, best first; per cent."""
    rows = []
    for name, cells in gaps.items():
        cell_means = {cell: float(np.mean(values)) for cell, values in cells.items()}
        shown = [
            " / ".join(f"{100 * cell_means[t, share, pin]:.1f}" for share in SHARES) for t in traces
        ]
        mean = float(np.mean([cell_means[t, share, pin] for t in traces for share in SHARES]))
        rows.append((mean, [name, *shown, f"{100 * mean:.1f}"]))
    return [row for _, row in sorted(rows, reverse=True)]


def main(args: argparse.Namespace) -> None:
    gaps: dict[str, dict[Cell, list[float]]] = defaultdict(lambda: defaultdict(list))
    for model in args.models:
        measure(args.traces / f"{model}.npz", args, gaps)
    for pin in args.pin:
        header = [f"{model} {'/'.join(map(str, SHARES))}" for model in args.models]
        rows = rows_of(gaps, pin, args.models)
        table(args, f"gap-{pin}", [f"pin {pin}", *header, "mean"], rows)
    if args.json:
        figures = [
            {"policy": name, "trace": t, "percent": share, "pin": pin, "gap_closed": values}
            for name, cells in gaps.items()
            for (t, share, pin), values in cells.items()
        ]
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    online = [p for p in POLICIES if not POLICIES[p].needs_trace and p != "lru"]
    parser = options(__doc__)
    parser.set_defaults(limit=1_000_000, models=["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
    parser.add_argument("--policies", type=lambda t: t.split(";"), default=online, metavar="P;P")
    parser.add_argument("--pin", nargs="+", choices=("none", "step"), default=["none", "step"])
    parser.add_argument("--half", choices=("report", "tuning"), default="report")
    parser.add_argument("--learned", action="store_true", help="start with learned state")
    parser.add_argument(
        "--trained", action="store_true", help="start with learned state and a trained network"
    )
    parser.add_argument(
        "--orders", type=int, choices=(1, 2, 3), default=3, help="of requests (1 with --quick)"
    )
    parser.add_argument("--json", type=Path, help="where to write every figure")
    args = parser.parse_args()
    args.learned |= args.trained
    main(args)
