"""Division of cache slots among layers, from recorded routing.

A *table* holds a layer's cost at every number of slots, [experts + 1]. The cost is the number of
misses, or the exposed seconds: the transfer time that computing does not hide. Both costs come from
one pass over the recording. LRU in each layer is a stack algorithm (`sim/curves.py`), so each
access to an expert is a hit from a certain number of slots on.

 - `optimal_slots` finds the least sum of costs by a dynamic programme over layers, as AdapMoE sizes
   its caches (Zhong et al., 2024, as MoEpic cites it).
 - `marginal_slots` gives slots, again and again, to the layer whose cost falls most for each slot.
   It uses the lower convex hull of a table, and differs from `optimal_slots` only in the last few
   slots.
 - MoEpic's own algorithm, which also splits experts, is in `configurator.py`.
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

    `stream` are the recorded requests of experts. `offsets` [layers + 1] are the ids, counted over
    all layers, at which each layer's experts begin. `reset` empties the caches before each prompt.
    Returns an array [experts + 1] for each layer.
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

    Exposed seconds are transfer time that computing does not hide. A layer's pass with m misses and
    h hits has max(0, m * load - h * compute) of them (MoEpic, equation 6). Here `load` is the time
    of one expert on the slowest link, and `compute` the time to compute one expert for one token.
    Returns an array [experts + 1] for each layer.
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

    `tables` hold each layer's cost at every number of slots; `capacity` is the number of slots of
    all layers. If several divisions cost the same, the later layers get fewer slots. BudgetError if
    there are fewer slots than layers.
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

    `tables` hold each layer's cost at every number of slots; `capacity` is the number of slots of
    all layers. BudgetError if there are fewer slots than layers.
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

    Returns a pair (gain of each slot, number of slots) for each edge, largest gain first.
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
        raise BudgetError(
            f"{len(tables)} layers need at least one cache slot each, but the capacity is"
            f" {capacity}: give at least {len(tables)}"
        )
    return min(capacity, sum(table.size - 1 for table in tables))


METHODS: dict[str, Callable[[Tables, int], list[int]]] = {
    "marginal": marginal_slots,
    "optimal": optimal_slots,
}
