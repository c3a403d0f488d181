"""A change of load in a run (MoE-Infinity, table 3): requests until all is as it was.

    python benchmarks/replay/recovery.py bench-data/olmoe-8 olmoe-1b-7b.npz

A session serves requests of one kind (labels of the recording), then others of another kind; its
twin serves the same others after requests of their own kind. What the first takes longer, and
misses more, is the excess; recovered is the first request from which the mean excess of WINDOW
requests is at most NEAR of what the twin takes. The requests before the change are served with
nothing computed; those after it are decoded token by token, in turns with the twin's.

papers/eamc_shift.py asks the same of the policies alone, over whole recordings.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from rig import Rig, arguments, cut
from speed import REACTIVE, Session, misses, run

from common import commit, machine, note, table  # isort: skip
from greenroom.trace import Trace

WINDOW, NEAR = 3, 0.02


def kinds(trace: Trace, number: int) -> dict[str, np.ndarray]:
    """Requests of each kind that has at least twice so many, the commonest first."""
    label = np.array([text.split("/")[0] for text in trace.labels])
    common = [name for name, count in Counter(label.tolist()).most_common() if count >= 2 * number]
    return {name: np.flatnonzero(label == name) for name in common}


def session(trace: Trace, before: np.ndarray, after: np.ndarray, tokens: int) -> Session:
    """All tokens of the requests after the change are counted."""
    filling = len(before) * tokens
    return Session(trace.select(np.append(before, after)), filling, filling)


def recovered(found: np.ndarray) -> int:
    """The first request from which the mean of WINDOW is small; all of them where none is."""
    means = np.convolve(found, np.ones(WINDOW) / WINDOW, "valid")
    small = np.flatnonzero(means <= NEAR)
    return int(small[0]) if small.size else len(found)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--share", type=float, default=0.25, help="of the experts resident")
    add("--ratio", type=float, default=1.0, help="transfer / compute of the reactive run")
    add("--requests", type=int, default=10, help="of each kind (default: %(default)s)")
    add("--tokens", type=int, default=16, help="of a request (default: %(default)s)")
    add("--variants", nargs="+", default=[REACTIVE, "eamc", "routing-path:2"], metavar="NAME")
    add("--seed", type=int, default=0)
    parser.set_defaults(guard=False)
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    short, random = cut(rig.trace, args.tokens), np.random.default_rng(args.seed)
    groups = {name: random.permutation(of) for name, of in kinds(short, args.requests).items()}
    names, n = [*groups], args.requests
    capacity, alone = int(rig.catalog.experts * args.share), rig.resident()[0]
    found: dict[str, list[tuple[np.ndarray, float, float]]] = {v: [] for v in args.variants}
    for old, new in pairwise([*names, names[0]]):
        after = groups[new][n : 2 * n]
        changed = session(short, groups[old][:n], after, args.tokens)
        same = session(short, groups[new][:n], after, args.tokens)
        carried = misses(same, capacity, args.policy) * rig.expert_bytes / (n * args.tokens)
        bandwidth = carried / (args.ratio * alone)
        for variant in args.variants:
            runs = [
                run(rig, each, capacity, bandwidth, args, variant) for each in (changed, same)
            ]
            took = [np.reshape(r["seconds"], (n, args.tokens)).sum(1) for r in runs]
            excess = (took[0] - took[1]) / took[1].mean()
            more = runs[0]["misses"] / runs[1]["misses"] - 1
            found[variant].append((excess, more, float(took[1].mean()) / args.tokens))
            record = {"from": old, "to": new, "variant": variant, "excess": excess.tolist()}
            note(json.dumps(record))
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps({**record, "more_misses": more}) + "\n")
    header = (
        "variant", "TPOT ms without a change", "requests to recover (least-mean-most)",
        "excess of the first", "of the last three", "misses more",
    )  # fmt: skip
    print(f"{len(names)} changes: {' -> '.join([*names, names[0]])}\n")
    print(table(header, [row(variant, each) for variant, each in found.items()]))


def row(variant: str, found: list[tuple[np.ndarray, float, float]]) -> tuple[Any, ...]:
    took = [recovered(excess) for excess, _, _ in found]
    mean = np.mean([excess for excess, _, _ in found], axis=0)
    return (
        variant, f"{statistics.fmean(tpot for _, _, tpot in found) * 1e3:.0f}",
        f"{min(took)}-{statistics.fmean(took):.1f}-{max(took)}", f"{mean[0]:.0%}",
        f"{mean[-3:].mean():.1%}", f"{statistics.fmean(more for _, more, _ in found):.1%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
