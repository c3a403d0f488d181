"""Policies that look at every resident: the one with the smallest score is evicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Floats, LogicalTime, PolicySetup, compiled


def layer_starts(setup: PolicySetup) -> Ints:
    """[L + 1] layer l has the pieces begin[l] .. begin[l + 1] - 1."""
    return np.searchsorted(setup.layer, np.arange(setup.layers + 1)).astype(np.int64)


@compiled
def on_use(cache: CacheState, state: Any, piece: int, now: LogicalTime) -> None:
    """Note the index of the piece's last request."""
    state.index[piece] = now.index


@compiled
def lowest(cache: CacheState, group: int, score: Floats, index: Ints) -> int:
    """The resident with the smallest score [P] that is not pinned, or -1. Of equal scores the one
    with the smallest index [P]."""
    best, least = -1, np.inf
    for slot in range(cache.first[group], cache.first[group + 1]):
        resident = cache.piece_in[slot]
        if resident < 0 or cache.pinned[resident] > 0:
            continue
        value = score[resident]
        if value < least or (value == least and index[resident] < index[best]):
            best, least = resident, value
    return int(best)
