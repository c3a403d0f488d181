"""Groups of requests that use similar experts (MoE-Infinity, section 4.4).

The measures are those of the paper's Table 2 and Figures 3 and 4. The expert activation matrix of a
request (rEAM) counts, for each layer and expert, the tokens that used the expert. K-means groups
the matrices by Euclidean distance. Each row of a matrix, which is a layer, is divided by its sum
first, so that requests of different length are comparable.
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
LOW = 0.12  # most transitions are less likely than this, says Figure 4
_ROUNDS = 30  # of Lloyd's algorithm; it ends earlier once no point changes its group


def activation_matrices(trace: Trace) -> NDArray[np.int64]:
    """Count how many tokens of each request used each expert of a model.

    Returns [requests, experts of all layers].
    """
    return np.stack([trace.uses(*each) for each in pairwise(trace.request_starts)])


@dataclass(frozen=True, eq=False)
class RequestGroups:
    """Clusters of a trace's requests that use similar experts, found by K-means.

    number:      the number of groups, chosen at the elbow of `inertia`
    of:          the group of each request, [requests]
    inertia:     the sum of squared distances to the cluster centres, for 1, 2, ... groups
    transitions: [a, b] is the share of the requests of group a that are followed by a request of
                 group b; a row is 0 if only the trace's last request is in group a
    """

    number: int
    of: NDArray[np.int64]
    inertia: Floats
    transitions: Floats

    @property
    def largest(self) -> float:
        """Share of requests in the largest group ("Nor. Max. Group" in MoE-Infinity's Table 2)."""
        return float(np.bincount(self.of).max() / len(self.of))


def group_requests(trace: Trace, most: int = MOST_GROUPS, seed: int = 0) -> RequestGroups:
    """Cluster a trace's requests by the experts they use, into at most `most` groups."""
    counts = activation_matrices(trace).astype(np.float64)
    for layer in range(trace.layers):
        rows = counts[:, trace.offsets[layer] : trace.offsets[layer + 1]]
        rows /= rows.sum(axis=1, keepdims=True)
    clusterings = _clusterings(counts, min(most, len(np.unique(counts, axis=0))), seed)
    inertia = np.array([distance for _, distance in clusterings])
    number = find_elbow(inertia)
    of = clusterings[number - 1][0]
    return RequestGroups(number, of, inertia, transitions(of, number))


def summary(trace: Trace, most: int = MOST_GROUPS, seed: int = 0) -> dict[str, Any]:
    """Return what `greenroom trace info` shows about groups of requests, in JSON types."""
    result = group_requests(trace, most, seed)
    left = result.transitions.sum(axis=1) > 0  # groups with a request that is not the last
    chances = result.transitions[left]
    return {
        "number": result.number,
        "largest": result.largest,
        "sizes": np.bincount(result.of).tolist(),
        "inertia": [round(float(x), 6) for x in result.inertia],
        "transitions": [[round(float(x), 6) for x in row] for row in result.transitions],
        "highest_transition": float(chances.max()) if chances.size else 0.0,
        "low_transitions": float((chances < LOW).mean()) if chances.size else 1.0,
    }


def find_elbow(inertia: Floats) -> int:
    """Return the number of groups at the elbow of a K-means inertia curve.

    `inertia` is the sum of squared distances for 1, 2, ... groups. The elbow is the point furthest
    below the straight line between the curve's ends.
    """
    if len(inertia) < 3 or inertia[0] == inertia[-1]:
        return 1 if inertia[0] == inertia[-1] else len(inertia)
    across = np.linspace(0, 1, len(inertia))
    down = (inertia[0] - inertia) / (inertia[0] - inertia[-1])
    return int(np.argmax(down - across)) + 1


def transitions(of: NDArray[np.int64], number: int) -> Floats:
    """Compute how often requests of one group are followed by requests of another.

    `of` is the group of each request, in order. In the result [number, number], row a has the
    shares of the next request's groups, and sums to 1, or to 0 if no request follows group a.
    """
    pairs = np.bincount(of[:-1] * number + of[1:], minlength=number * number)
    counts = pairs.reshape(number, number).astype(np.float64)
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _clusterings(points: Floats, most: int, seed: int) -> list[tuple[NDArray[np.int64], float]]:
    """Run K-means for 1 to `most` groups; return (group of each point, inertia) of each run.

    Each run begins with the centres of the run before and one more point, drawn with a probability
    proportional to its squared distance to its centre (k-means++), so inertia never rises.
    """
    random = np.random.default_rng(seed)
    square = (points**2).sum(axis=1)
    centres = points.mean(axis=0, keepdims=True)
    clusterings = []
    while True:
        of, distance, centres = _lloyd(points, square, centres)
        clusterings.append((of, float(distance.sum())))
        if len(centres) == most or distance.sum() <= 0:
            return clusterings
        chosen = random.choice(len(points), p=distance / distance.sum())
        centres = np.vstack([centres, points[chosen]])


def _lloyd(
    points: Floats, square: Floats, centres: Floats
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Run Lloyd's K-means algorithm from initial centres.

    Returns (the nearest centre of each point, the squared distance to that centre, the centres).
    """
    of = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        distances = square[:, None] - 2 * points @ centres.T + (centres**2).sum(axis=1)
        nearest = distances.argmin(axis=1)
        if (nearest == of).all():
            break
        of = nearest
        members = np.bincount(of, minlength=len(centres))
        sums = (of == np.arange(len(centres))[:, None]).astype(np.float64) @ points
        occupied = members > 0  # a centre without points stays where it is
        centres = centres.copy()
        centres[occupied] = sums[occupied] / members[occupied, None]
    exact = ((points - centres[of]) ** 2).sum(axis=1)
    return of, exact, centres
