"""ExpertFlow and Read-ME: how many experts a pass of several answers uses, by who shares it.

A pass has one token of each of n answers (the t-th token of n requests of at least --tokens tokens,
for t = 1 .. --tokens). Distinct experts a layer, a mean over layers, tokens and groups of requests:
`arrival`: groups in random order, as requests arrive; `label`: groups of one label; `routing`:
groups chosen by the requests' whole routing, which no server knows beforehand: a random request and
the n - 1 whose expert counts are nearest to its own (cosine), then the next. `two passes` is the
sum of two passes of half of each `arrival` group.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import MODELS, options, recordings, table

from greenroom.trace import Trace
from greenroom.trace.groups import activation_matrices

SIZES = (2, 4, 8, 16, 64)
Groups = list[np.ndarray]


def used_by(trace: Trace, requests: np.ndarray, tokens: int) -> np.ndarray:
    """[requests, tokens, experts of all layers] whether a token uses an expert."""
    rows = trace.request_starts[requests, None] + np.arange(tokens)
    ids = (trace.experts[rows] + trace.offsets[:-1, None]).reshape(*rows.shape, -1)
    used = np.zeros((*rows.shape, int(trace.offsets[-1])), np.bool_)
    np.put_along_axis(used, ids, True, axis=2)
    return used


def distinct(used: np.ndarray, groups: Groups, layers: int) -> float:
    """Distinct experts a layer in a pass, a mean over groups and tokens."""
    return float(np.mean([used[group].any(0).sum(1).mean() / layers for group in groups]))


def in_order(order: np.ndarray, size: int) -> Groups:
    """Groups of consecutive requests; the last ones are left out if they do not fill a group."""
    return [order[i : i + size] for i in range(0, order.size - size + 1, size)]


def by_label(order: np.ndarray, labels: np.ndarray, size: int) -> Groups:
    """Groups of one label each."""
    kinds = sorted({*labels.tolist()})
    return [group for kind in kinds for group in in_order(order[labels[order] == kind], size)]


def by_routing(order: np.ndarray, counts: np.ndarray, size: int) -> Groups:
    """Groups of requests with similar counts of experts, built one after another."""
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    left, groups = order.tolist(), []
    while len(left) >= size:
        near = np.argsort(-(unit[left] @ unit[left[0]]), kind="stable")[:size]
        groups.append(np.array([left[i] for i in near]))
        left = [r for i, r in enumerate(left) if i not in {*near.tolist()}]
    return groups


def main(args: argparse.Namespace) -> None:
    rows = []
    for model, trace in recordings(args).items():
        chosen = np.flatnonzero(np.diff(trace.request_starts) >= args.tokens)
        chosen = chosen[: 32 if args.quick else args.requests]
        used = used_by(trace, chosen, args.tokens)
        labels = np.array(trace.labels)[chosen]
        counts = activation_matrices(trace)[chosen].reshape(chosen.size, -1).astype(np.float64)
        order = np.random.default_rng(args.seed).permutation(chosen.size)
        for size in (n for n in SIZES if n <= chosen.size):
            arrival = in_order(order, size)
            halves = [half for group in arrival for half in np.array_split(group, 2)]
            ways = (arrival, by_label(order, labels, size), by_routing(order, counts, size))
            figures = [distinct(used, g, trace.layers) if g else None for g in ways]
            figures.append(2 * distinct(used, halves, trace.layers))
            shown = ("-" if x is None else f"{x:.1f}" for x in figures)
            rows.append([MODELS[model], chosen.size, size, *shown])
    header = ["recording", "requests", "answers", "arrival", "label", "routing", "two passes"]
    table(args, "batches", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--requests", type=int, default=256, help="of a recording, at most")
    main(parser.parse_args())
