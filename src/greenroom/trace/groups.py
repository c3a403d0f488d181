"""Groups of requests that use the same experts: MoE-Infinity, 4.4, Table 2 and Figures 3 and 4.

A request's expert activation matrix (rEAM) counts, for each layer and expert, the tokens that used
it. K-means groups them by Euclidean distance; each layer's row is divided by its sum first, so that
requests of different length can be alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.trace.trace import Trace

Floats = NDArray[np.float64]
MOST_GROUPS = 40
LOW = 0.12  # most transitions are less likely, Figure 4 says
_ROUNDS = 30  # of Lloyd's algorithm; it ends earlier where nothing moves


def activation_matrices(trace: Trace) -> NDArray[np.int64]:
    """[requests, experts of all layers] how many tokens of a request used each expert."""
    return np.stack([trace.uses(*each) for each in pairwise(trace.request_starts)])


@dataclass(frozen=True, eq=False)
class RequestGroups:
    """`number` groups, the elbow of `inertia` [most groups]: squared distances to the centres.

    `of` [requests] is each request's group; `transitions[a, b]` the share of the requests of group
    a whose next request is of group b (rows without a next one are 0).
    """

    number: int
    of: NDArray[np.int64]
    inertia: Floats
    transitions: Floats

    @property
    def largest(self) -> float:
        """The share of requests in the largest group: "Nor. Max. Group" of Table 2."""
        return float(np.bincount(self.of).max() / len(self.of))


def group_requests(trace: Trace, most: int = MOST_GROUPS, seed: int = 0) -> RequestGroups:
    """Group the requests of a trace; `most` bounds the number of groups that is tried."""
    counts = activation_matrices(trace).astype(np.float64)
    for layer in range(trace.layers):
        rows = counts[:, trace.offsets[layer] : trace.offsets[layer + 1]]
        rows /= rows.sum(axis=1, keepdims=True)
    found = _clusterings(counts, min(most, len(np.unique(counts, axis=0))), seed)
    inertia = np.array([distance for _, distance in found])
    number = elbow(inertia)
    of = found[number - 1][0]
    return RequestGroups(number, of, inertia, transitions(of, number))


def summary(trace: Trace, most: int = MOST_GROUPS, seed: int = 0) -> dict[str, Any]:
    """The figures that `trace info` prints: JSON types only."""
    found = group_requests(trace, most, seed)
    left = found.transitions.sum(axis=1) > 0  # groups that another request follows
    chances = found.transitions[left]
    return {
        "number": found.number,
        "largest": found.largest,
        "sizes": np.bincount(found.of).tolist(),
        "inertia": [round(float(x), 6) for x in found.inertia],
        "transitions": [[round(float(x), 6) for x in row] for row in found.transitions],
        "highest_transition": float(chances.max()) if chances.size else 0.0,
        "low_transitions": float((chances < LOW).mean()) if chances.size else 1.0,
    }


def elbow(inertia: Floats) -> int:
    """The number of groups, from 1, where the curve lies furthest below the line of its ends."""
    if len(inertia) < 3 or inertia[0] == inertia[-1]:
        return 1 if inertia[0] == inertia[-1] else len(inertia)
    across = np.linspace(0, 1, len(inertia))
    down = (inertia[0] - inertia) / (inertia[0] - inertia[-1])
    return int(np.argmax(down - across)) + 1


def transitions(of: NDArray[np.int64], number: int) -> Floats:
    """[number, number] how often a request of group a is followed by one of group b."""
    pairs = np.bincount(of[:-1] * number + of[1:], minlength=number * number)
    counts = pairs.reshape(number, number).astype(np.float64)
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _clusterings(points: Floats, most: int, seed: int) -> list[tuple[NDArray[np.int64], float]]:
    """(group of each point, inertia) for 1 to `most` groups, by K-means.

    Each clustering begins with the centres of the last and one point more, drawn by its squared
    distance to them (k-means++), so that inertia never rises.
    """
    random = np.random.default_rng(seed)
    square = (points**2).sum(axis=1)
    centres = points.mean(axis=0, keepdims=True)
    found = []
    while True:
        of, distance, centres = _lloyd(points, square, centres)
        found.append((of, float(distance.sum())))
        if len(centres) == most or distance.sum() <= 0:
            return found
        chosen = random.choice(len(points), p=distance / distance.sum())
        centres = np.vstack([centres, points[chosen]])


def _lloyd(
    points: Floats, square: Floats, centres: Floats
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """(nearest centre of each point, squared distance to it, centres), moved until none moves."""
    of = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        apart = square[:, None] - 2 * points @ centres.T + (centres**2).sum(axis=1)
        nearest = apart.argmin(axis=1)
        if (nearest == of).all():
            break
        of = nearest
        members = np.bincount(of, minlength=len(centres))
        sums = (of == np.arange(len(centres))[:, None]).astype(np.float64) @ points
        kept = members > 0  # a centre that has lost all its points stays where it is
        centres = centres.copy()
        centres[kept] = sums[kept] / members[kept, None]
    exact = ((points - centres[of]) ** 2).sum(axis=1)
    return of, exact, centres
