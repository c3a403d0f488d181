"""PreMoe and EASY-EP: how much of what a task needs later a small set of experts covers.

A set has the best experts of every layer, by their scores on some tokens, and is judged on later
ones. `request`: chosen from the first quarter of a request, judged on the rest of it (requests of
at least --tokens tokens). `task`: chosen from the first --shots requests of a label, judged on its
other requests. Scores are those of `greenroom trace hot`: `counts`, the share of the tokens that
use an expert; `tcess`, PreMoe's task-conditioned expected selection score, which needs gate
weights; `easy-ep`, which also needs the norms of experts' outputs. The recordings do not have
norms, a trace of `greenroom trace record --weights --output-norms` (--own) has them. `covered` is
the share of the later tokens' choices that are in the set, `weight` their share of the later gate
weights, `term` their share of the later terms of easy-ep (a mean over layers, whose terms differ in
size). Means over requests, or over labels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import MODELS, limit, options, percent, recordings, table

from greenroom.sim.pinned import SCORES, best_experts, contributions, expert_scores
from greenroom.trace import Trace, load
from greenroom.trace.trace import OPTIONAL

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
    arrays = {name: getattr(trace, name) for name in OPTIONAL}
    return Trace(
        experts=trace.experts[start:end],
        experts_per_layer=trace.experts_per_layer,
        request_starts=np.array([0, end - start]),
        pass_starts=np.arange(end - start + 1),
        pass_prefill=np.zeros(end - start, np.bool_),
        labels=("",),
        **{name: None if each is None else each[start:end] for name, each in arrays.items()},
    )


def measures(trace: Trace) -> dict[str, np.ndarray]:
    """Of what a set's share is measured: [tokens, layers, top_k], by the column's name."""
    found = {"covered": np.ones(trace.experts.shape)}
    if trace.weights is not None:
        found["weight"] = np.abs(trace.weights.astype(np.float64))
    if has_terms(trace):
        found["term"] = contributions(trace, slice(None))
    return found


def has_terms(trace: Trace) -> bool:
    return trace.weights is not None and trace.output_norms is not None


def covered(parts: Parts, score: str, share: float) -> dict[str, float]:
    """The shares of later tokens' measures that a set covers."""
    first, later = parts
    offsets = first.offsets.tolist()
    kept = np.zeros(offsets[-1], np.bool_)
    kept[best_experts(expert_scores(first, score), offsets, share)] = True
    in_set = kept[later.experts + first.offsets[:-1, None]]
    shares = {}
    for name, x in measures(later).items():
        axes = (0, 2) if name == "term" else None
        shares[name] = float(np.mean((in_set * x).sum(axes) / x.sum(axes)))
    return shares


def scores_of(trace: Trace) -> list[str]:
    """The scores for which a trace has what they need."""
    lacks = {"tcess": trace.weights is None, "easy-ep": not has_terms(trace)}
    return [score for score in SCORES if not lacks.get(score)]


def main(args: argparse.Namespace) -> None:
    rows = []
    traces = {MODELS[name]: each for name, each in recordings(args).items()} if not args.own else {}
    traces |= {path.stem: load(path) for path in args.own}
    columns = [
        (score, what)
        for score in SCORES
        for what in ("covered", "weight", "term")
        if args.own or (score != "easy-ep" and what != "term")
    ]
    for model, recording in traces.items():
        trace = recording.head(limit(args))
        for how, sets in (
            ("request", list(by_request(trace, args.tokens))),
            ("task", list(by_task(trace, args.shots))),
        ):
            for share in SHARES if sets else ():
                found = {}
                for score in scores_of(trace):
                    each = [covered(parts, score, share) for parts in sets]
                    for what in each[0]:
                        found[score, what] = percent(float(np.mean([x[what] for x in each])))
                cells = [found.get(column, "-") for column in columns]
                rows.append([model, how, len(sets), f"{share:.1%}", *cells])
    header = ["recording", "set of a", "sets", "of each layer"]
    header += [f"{score}: {what}" for score, what in columns]
    table(args, "task-sets-own" if args.own else "task-sets", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=1_000_000)
    parser.add_argument("--tokens", type=int, default=32, help="of a request, at least")
    parser.add_argument(
        "--own", nargs="+", type=Path, default=[], metavar="FILE",
        help="traces of `greenroom trace record` in place of the recordings, which also have the"
        " columns of easy-ep",
    )  # fmt: skip
    parser.add_argument("--shots", type=int, default=5, help="requests of a label for its set")
    main(parser.parse_args())
