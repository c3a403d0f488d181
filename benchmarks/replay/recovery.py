"""A change of load in a run (MoE-Infinity, table 3): requests until the cache has recovered.

    python benchmarks/replay/recovery.py bench-data/olmoe-8 olmoe-1b-7b.npz

A session serves requests of one kind (labels of the recording), then others of another kind; its
twin serves the same others after requests of their own kind. The excess is the share of a request
that the first misses and the twin does not; recovered is the first request from which the mean
excess of WINDOW requests is at most NEAR of what the twin misses. The requests before the change
are served with nothing computed; those after it are decoded token by token.

papers/eamc_shift.py asks the same of the policies alone, over whole recordings.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from rig import Rig, arguments, cut, forced
from speed import REACTIVE, Session, misses

from common import commit, machine, note, table  # isort: skip
from greenroom.trace import Trace

WINDOW, NEAR = 3, 0.05


def kinds(trace: Trace, number: int) -> dict[str, np.ndarray]:
    """Requests of each kind, the commonest kind first, as indices by name.

    A kind has at least twice `number` requests.
    """
    label = np.array([text.split("/")[0] for text in trace.labels])
    common = [name for name, count in Counter(label.tolist()).most_common() if count >= 2 * number]
    return {name: np.flatnonzero(label == name) for name in common}


def session(trace: Trace, before: np.ndarray, after: np.ndarray, tokens: int) -> Session:
    """A session in which all tokens of the requests after the change are counted."""
    filling = len(before) * tokens
    return Session(trace.select(np.append(before, after)), filling, filling)


def served(
    rig: Rig, each: Session, capacity: int, bandwidth: float, policy: str, variant: str
) -> tuple[np.ndarray, np.ndarray]:
    """Play requests after a change of load; return their [requests] misses and seconds."""
    cache = rig.attach(
        capacity, policy=policy, bandwidth=bandwidth, session=each.trace,
        prefetch="off" if variant == REACTIVE else variant,
    )  # fmt: skip
    rig.warm(each.trace.head(each.filling))
    missed, seconds = [], []
    starts = each.trace.request_starts
    with forced(rig.model, each.trace) as routing:
        for begin, end in pairwise(starts[starts >= each.filling].tolist()):
            cache.reset_stats()
            seconds.append(sum(routing.play(range(begin, end))))
            stats = cache.stats()
            missed.append(stats.expert_requests - stats.expert_hits)
    return np.array(missed), np.array(seconds)


def recovered(per_request: np.ndarray) -> int:
    """The first request from which the mean excess over WINDOW requests is small.

    If there is none, it is the number of all requests.
    """
    window_means = np.convolve(per_request, np.ones(WINDOW) / WINDOW, "valid")
    small = np.flatnonzero(window_means <= NEAR)
    return int(small[0]) if small.size else len(per_request)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--share", type=float, default=0.25, help="of the experts resident")
    add("--ratio", type=float, default=1.0, help="transfer / compute of the reactive run")
    add("--requests", type=int, default=10, help="of each kind (default: %(default)s)")
    add("--tokens", type=int, default=16, help="of a request (default: %(default)s)")
    add("--variants", nargs="+", default=[REACTIVE, "eamc", "routing-path:2"], metavar="NAME")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    short, random = cut(rig.trace, args.tokens), np.random.default_rng(args.seed)
    groups = {name: random.permutation(of) for name, of in kinds(short, args.requests).items()}
    names, n = [*groups], args.requests
    capacity, resident_s = int(rig.catalog.experts * args.share), rig.resident()[0]
    per_request: dict[str, list[tuple[np.ndarray, float, float]]] = {v: [] for v in args.variants}
    for before, kind in pairwise([*names, names[0]]):
        after = groups[kind][n : 2 * n]
        changed = session(short, groups[before][:n], after, args.tokens)
        same = session(short, groups[kind][:n], after, args.tokens)
        carried = misses(same, capacity, args.policy) * rig.expert_bytes / (n * args.tokens)
        bandwidth = carried / (args.ratio * resident_s)
        for variant in args.variants:
            new, old = (
                served(rig, each, capacity, bandwidth, args.policy, variant)
                for each in (changed, same)
            )
            excess = (new[0] - old[0]) / old[0].mean()
            slower = float(new[1].sum() / old[1].sum() - 1)
            per_request[variant].append((excess, slower, float(old[1].mean()) / args.tokens))
            record = {
                "from": before, "to": kind, "variant": variant, "excess": excess.tolist(),
                "slower": slower, "misses": old[0].tolist(),
            }  # fmt: skip
            note(json.dumps(record))
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    header = (
        "variant", "TPOT ms without a change", "requests to recover (least-mean-most)",
        "excess of the first", "of the last three", "slower over all",
    )  # fmt: skip
    print(f"{len(names)} changes: {' -> '.join([*names, names[0]])}\n")
    print(table(header, [row(variant, each) for variant, each in per_request.items()]))


def row(variant: str, per_request: list[tuple[np.ndarray, float, float]]) -> tuple[Any, ...]:
    took = [recovered(excess) for excess, *_ in per_request]
    mean = np.mean([excess for excess, *_ in per_request], axis=0)
    return (
        variant, f"{statistics.fmean(tpot for _, _, tpot in per_request) * 1e3:.0f}",
        f"{min(took)}-{statistics.fmean(took):.1f}-{max(took)}", f"{mean[0]:.0%}",
        f"{mean[-3:].mean():.1%}",
        f"{statistics.fmean(slower for _, slower, _ in per_request):.1%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
