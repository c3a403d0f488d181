"""Scans of the cache for eviction policies that evict the expert with the smallest score."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Floats, LogicalTime, PolicySetup, compiled


def layer_starts(setup: PolicySetup) -> Ints:
    """Return the first expert id of each layer, and the end of the last: [layers + 1]."""
    return np.searchsorted(setup.layer, np.arange(setup.layers + 1)).astype(np.int64)


@compiled
def on_use(cache: CacheState, state: Any, piece: int, now: LogicalTime) -> None:
    """Record the index of an expert's last request in `state.index`."""
    state.index[piece] = now.index


@compiled
def lowest_unpinned(cache: CacheState, group: int, score: Floats, index: Ints) -> int:
    """Find a slot group's unpinned cached expert with the smallest score; -1 if none.

    `score` and `index` have one value for each expert. Of equal scores, the smallest index wins.
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
