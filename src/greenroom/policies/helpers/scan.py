"""Scans of the cache for eviction policies that evict the piece with the smallest score."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Floats, LogicalTime, PolicySetup, compiled


def layer_starts(setup: PolicySetup) -> Ints:
    """Return each layer's first piece id, [L + 1]: layer l has begin[l] .. begin[l + 1] - 1."""
    return np.searchsorted(setup.layer, np.arange(setup.layers + 1)).astype(np.int64)


@compiled
def on_use(cache: CacheState, state: Any, piece: int, now: LogicalTime) -> None:
    """Record when a piece was last requested, as the index of the request."""
    state.index[piece] = now.index


@compiled
def lowest_unpinned(cache: CacheState, group: int, score: Floats, index: Ints) -> int:
    """Find the unpinned cached piece with the smallest score; -1 if none.

    `score` and `index` are by piece [P]; ties go to the smallest index.
    """
    best, least = -1, np.inf
    for slot in range(cache.first[group], cache.first[group + 1]):
        resident = cache.piece_in[slot]
        if resident < 0 or cache.pinned[resident] > 0:
            continue
        value = score[resident]
        if value < least or (value == least and index[resident] < index[best]):
            best, least = resident, value
    return int(best)
