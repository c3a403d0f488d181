"""PreMoe and EASY-EP: how much of what a task needs later a small set of experts covers.

A set has the best experts of every layer, by their scores on some tokens, and is judged on later
ones. `request`: chosen from the first quarter of a request, judged on the rest of it (requests of
at least --tokens tokens). `task`: chosen from the first --shots requests of a label, judged on its
other requests. Scores are those of `greenroom trace hot`: `counts`, the share of the tokens that
use an expert, and `tcess`, PreMoe's task-conditioned expected selection score, which needs gate
weights. `covered` is the share of the later tokens' choices that are in the set, `weight` their
share of the later gate weights. Means over requests, or over labels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from common import MODELS, limit, options, percent, recordings, table

from greenroom.sim.pinned import SCORES, best_experts, expert_scores
from greenroom.trace import Trace

SHARES = (0.5, 0.25, 0.125)
Parts = tuple[Trace, Trace]  # from which a set is chosen, and on which it is judged


def by_request(trace: Trace, tokens: int) -> Iterator[Parts]:
    """The first quarter and the rest of every request that is long enough."""
    lengths = np.diff(trace.request_starts)
    for request in np.flatnonzero(lengths >= max(tokens, 4)):
        start, end = trace.request_starts[request : request + 2]
        middle = start + lengths[request] // 4
        yield part(trace, start, middle), part(trace, middle, end)


def by_task(trace: Trace, shots: int) -> Iterator[Parts]:
    """The first requests and the others of every label that has more than that."""
    labels = np.array(trace.labels)
    for label in sorted({*trace.labels}):
        requests = np.flatnonzero(labels == label)
        if requests.size > shots:
            yield trace.select(requests[:shots]), trace.select(requests[shots:])


def part(trace: Trace, start: int, end: int) -> Trace:
    """Some consecutive tokens of one request, each a pass."""
    weights = None if trace.weights is None else trace.weights[start:end]
    return Trace(
        experts=trace.experts[start:end],
        experts_per_layer=trace.experts_per_layer,
        request_starts=np.array([0, end - start]),
        pass_starts=np.arange(end - start + 1),
        pass_prefill=np.zeros(end - start, np.bool_),
        labels=("",),
        weights=weights,
    )


def covered(parts: Parts, score: str, share: float) -> tuple[float, float]:
    """The share of later choices, and of later gate weights, that a set covers; nan if unknown."""
    first, later = parts
    offsets = first.offsets.tolist()
    kept = np.zeros(offsets[-1], np.bool_)
    kept[best_experts(expert_scores(first, score), offsets, share)] = True
    in_set = kept[later.experts + first.offsets[:-1, None]]
    if later.weights is None:
        return float(in_set.mean()), float("nan")
    weights = np.abs(later.weights.astype(np.float64))
    return float(in_set.mean()), float((in_set * weights).sum() / weights.sum())


def main(args: argparse.Namespace) -> None:
    rows = []
    for model, recording in recordings(args).items():
        trace = recording.head(limit(args))
        for how, sets in (
            ("request", list(by_request(trace, args.tokens))),
            ("task", list(by_task(trace, args.shots))),
        ):
            for share in SHARES if sets else ():
                cells = []
                for score in SCORES:
                    if score == "tcess" and trace.weights is None:
                        cells += ["-", "-"]
                        continue
                    each = np.mean([covered(parts, score, share) for parts in sets], axis=0)
                    cells += [percent(x) if np.isfinite(x) else "-" for x in each]
                rows.append([MODELS[model], how, len(sets), f"{share:.1%}", *cells])
    header = ["recording", "set of a", "sets", "of each layer"]
    header += [f"{score}: {what}" for score in SCORES for what in ("covered", "weight")]
    table(args, "task-sets", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=1_000_000)
    parser.add_argument("--tokens", type=int, default=32, help="of a request, at least")
    parser.add_argument("--shots", type=int, default=5, help="requests of a label for its set")
    main(parser.parse_args())
