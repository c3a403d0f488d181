"""Division of cache slots among layers, from recorded routing.

A *table* is a layer's cost at every number of slots, [experts + 1]: misses, or exposed seconds
(transfer time that computing does not hide). Both come from one pass over the recording: LRU for
each layer is a stack algorithm (`sim/curves.py`), so each request has a number of slots from which
on it is a hit.

 - `optimal_slots` finds the least sum of costs by a dynamic programme over layers, as AdapMoE sizes
   its caches (Zhong et al., 2024, as MoEpic cites it);
 - `marginal_slots` gives the next slots to the layer that gains most for each of them. It goes by
   the lower hull of a table, and equals `optimal_slots` but for the last few slots;
 - MoEpic's own algorithm, which splits experts too, is in `configurator.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cost import Costs
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import BudgetError
from greenroom.sim.curves import lru_depths

Floats = NDArray[np.float64]
Tables = Sequence[Floats]


def miss_tables(stream: Stream, offsets: Ints, *, reset: bool = False) -> list[Floats]:
    """Compute each layer's LRU misses at every number of cache slots.

    `offsets` [L + 1] are dense.
    """
    depths, layer = (
        lru_depths(stream, offsets, reset=reset),
        np.repeat(stream.layer, np.diff(stream.starts)),
    )
    tables = []
    for number, experts in enumerate(np.diff(offsets).tolist()):
        layer_depths = depths[layer == number]
        hits = np.bincount(layer_depths[layer_depths > 0], minlength=experts + 1)
        tables.append(layer_depths.size - np.cumsum(hits).astype(np.float64))
    return tables


def exposed_tables(
    stream: Stream, offsets: Ints, costs: Costs, expert_bytes: int, *, reset: bool = False
) -> list[Floats]:
    """Compute each layer's exposed transfer seconds at every number of cache slots.

    A step with m misses and h hits is exposed for max(0, m * load - h * compute) (MoEpic, equation
    6), where `load` is the time of one expert on the slowest link.
    """
    load = expert_bytes / min(link.bandwidth for link in costs.links)
    compute = costs.expert.seconds(1)
    depths, sizes = lru_depths(stream, offsets, reset=reset), np.diff(stream.starts)
    tables = []
    for number, experts in enumerate(np.diff(offsets).tolist()):
        steps = (stream.layer == number) & (sizes > 0)
        layer_depths = depths[np.repeat(steps, sizes)]
        starts = np.cumsum(sizes[steps]) - sizes[steps]
        requests, table = sizes[steps], []
        for slots in range(experts + 1):
            missed = (layer_depths > slots) | (layer_depths == 0)
            misses = np.add.reduceat(missed, starts, dtype=np.int64) if starts.size else requests
            table.append(np.maximum(0.0, misses * load - (requests - misses) * compute).sum())
        tables.append(np.array(table))
    return tables


def optimal_slots(tables: Tables, capacity: int) -> list[int]:
    """Find each layer's number of cache slots, at least one, with the least total cost.

    Of equal sums it takes the one with fewer slots for later layers. BudgetError for fewer slots
    than layers.
    """
    capacity = _check(tables, capacity)
    best = np.full(capacity + 1, np.inf)  # least cost, by slots spent so far
    best[0] = 0.0
    choices = []
    for table in tables:
        after, chosen = np.full(capacity + 1, np.inf), np.zeros(capacity + 1, np.int64)
        for slots in range(1, min(table.size, capacity + 1)):
            sums = best[: capacity + 1 - slots] + table[slots]
            better = np.flatnonzero(sums < after[slots:]) + slots
            after[better], chosen[better] = sums[better - slots], slots
        best = after
        choices.append(chosen)
    left, sizes = capacity, []
    for chosen in reversed(choices):
        sizes.append(int(chosen[left]))
        left -= sizes[-1]
    return sizes[::-1]


def marginal_slots(tables: Tables, capacity: int) -> list[int]:
    """Find each layer's number of cache slots, at least one, by largest marginal gain.

    BudgetError for fewer slots than layers.
    """
    left = _check(tables, capacity) - len(tables)
    steps = [
        (-gain, layer, slots)
        for layer, table in enumerate(tables)
        for gain, slots in _hull(table[1:])
    ]
    sizes = [1] * len(tables)
    for _, layer, slots in sorted(steps):
        added = min(slots, left)
        sizes[layer] += added
        left -= added
    return sizes


def _hull(table: Floats) -> list[tuple[float, int]]:
    """Compute the lower convex hull of a layer's cost table.

    Returns (gain of each slot, slots), largest gain first.
    """

    def slope(a: int, b: int) -> float:
        return float(table[b] - table[a]) / (b - a)

    corners: list[int] = []
    for slots in range(table.size):
        while len(corners) > 1 and slope(corners[-2], slots) <= slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(slots)
    return [(-slope(a, b), b - a) for a, b in pairwise(corners)]


def _check(tables: Tables, capacity: int) -> int:
    """Check a cache capacity, and bound it by the number of experts."""
    if capacity < len(tables):
        raise BudgetError(f"{len(tables)} layers need at least one slot each, got {capacity}")
    return min(capacity, sum(table.size - 1 for table in tables))


METHODS: dict[str, Callable[[Tables, int], list[int]]] = {
    "marginal": marginal_slots,
    "optimal": optimal_slots,
}
