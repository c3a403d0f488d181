"""Miss-ratio curves of LRU and OPT: all cache capacities in one pass over a trace.

Both policies are stack algorithms: a cache contains everything that a smaller cache contains
(Mattson et al., 1970, "Evaluation techniques for storage hierarchies"). So each access to an expert
has a depth, which is the smallest capacity at which it is a hit. No expert is protected from
eviction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.policies.opt import next_uses
from greenroom.sim.replay import layer_of_ids, step_ranges
from greenroom.trace.kernels import stack_depths


class MissCurve(NamedTuple):
    """Misses of an eviction policy at every cache capacity.

    `misses[i]` of the `requests` (accesses to experts) are misses if the cache has `capacities[i]`
    slots. Capacities ascend.
    """

    capacities: Ints
    misses: Ints
    requests: int


def _curve(
    stream: Stream,
    offsets: Ints,
    *,
    scope: Scope = "shared",
    reset: bool = False,
    future: bool,
) -> MissCurve:
    """Compute the misses of LRU (or OPT, if `future`) at every cache capacity.

    stream:  expert requests in order
    offsets: first expert id of each layer, and the number of all experts, [layers + 1]
    scope:   one cache for all layers ("shared"), or a share of the capacity for each layer
    reset:   whether the cache is empty at the start of every request

    The results equal those of `replay` with pin="none". Raises UsageError for an impossible scope.
    """
    layer = layer_of_ids(offsets)
    layers, most = len(offsets) - 1, np.diff(offsets).tolist()
    per_layer = scope != "shared"
    least = layers if per_layer else 1
    split_capacity(least, layers, scope, most)
    group_of = layer if per_layer else np.zeros(layer.size, np.int64)
    groups, wide = layers if per_layer else 1, layer.size + 1
    depths = _depths(stream, group_of, reset, future)
    # A row for each group: how many requests have the depth 1, 2, ...
    counts = np.bincount(group_of[stream.pieces] * wide + depths, minlength=groups * wide)
    hits = counts.reshape(groups, wide)
    hits[:, 0] = 0
    below = hits.cumsum(axis=1)
    requests = stream.pieces.size
    capacities = np.arange(least, wide, dtype=np.int64)
    shares = [split_capacity(n, layers, scope, most) for n in capacities.tolist()]
    slots = np.minimum(np.array(shares, np.int64), layer.size)
    hit_counts = below[np.arange(groups), slots].sum(axis=1)
    return MissCurve(capacities, requests - hit_counts, requests)


lru_curve, opt_curve = partial(_curve, future=False), partial(_curve, future=True)


def lru_depths(stream: Stream, offsets: Ints, *, reset: bool = False) -> Ints:
    """Compute the fewest slots with which an LRU cache hits, for each expert access.

    Every layer has its own cache. `offsets` has the first expert id of each layer, and the number
    of all experts. With `reset`, the caches are empty at the start of every prompt. The result is 0
    for an access that no size of cache can hit, such as the first to an expert.
    """
    return _depths(stream, layer_of_ids(offsets), reset, future=False)


def _depths(stream: Stream, group_of: Ints, reset: bool, future: bool) -> Ints:
    depths = np.empty(stream.pieces.size, np.int64)
    for steps in step_ranges(stream, reset):
        part = slice(*stream.starts[list(steps)])
        pieces = stream.pieces[part]
        following = next_uses(pieces, group_of.size) if future else np.empty(0, pieces.dtype)
        depths[part] = stack_depths(pieces, group_of, following)
    return depths


def curve_capacities(requested: Sequence[int], experts: int, least: int) -> Iterator[int]:
    """Yield the capacities of a curve in a chart: the requested ones, and twelve more.

    The twelve are from 2% to 100% of the number of `experts`. Capacities below `least` are left
    out.
    """
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    points = {int(share * experts) for share in shares} | set(requested)
    yield from sorted(point for point in points if point >= least)
