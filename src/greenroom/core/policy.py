"""What an eviction policy is: four compiled functions over flat arrays.

A policy is told of inserts, hits and evictions and names a victim among the residents that are not
pinned. It never counts, moves or reads a clock: `now` is the logical time `pass * layers + layer`.
All four are `compiled` functions of (state, piece or group, now), so that the cache can bind them
into one step; the policy's own memory is `state.ints` and `state.floats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from greenroom.core.pieces import Ints

Floats = NDArray[np.float64]

# Called by compiled code only: without a wrapper for Python each takes a third less to compile.
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


class State(NamedTuple):
    """The cache's arrays. P pieces, S slots, G groups (budgets that do not share slots)."""

    slot_of: Ints  # [P] slot of a resident or arriving piece, else -1
    piece_in: Ints  # [S] piece that has the slot, else -1
    pinned: Ints  # [P] > 0 where the piece must not be evicted
    group_of: Ints  # [P] group that the piece belongs to
    free: Ints  # [S] stack of free slots of each group, group g's from first[g]
    first: Ints  # [G + 1] slots first[g] .. first[g + 1] belong to group g
    free_count: Ints  # [G] free slots of each group
    ints: Ints  # the policy's own
    floats: Floats  # the policy's own


@dataclass(frozen=True)
class Policy:
    """A policy by name.

    `memory(pieces, groups, seed)` makes its (ints, floats); `on_hit(state, piece, now)`,
    `on_insert(state, piece, now)` and `on_evict(state, piece, now)` keep them up to date;
    `victim(state, group, now)` returns a resident piece of the group that is not pinned, or -1.
    """

    name: str
    memory: Callable[[int, int, int], tuple[Ints, Floats]]
    on_hit: Any
    on_insert: Any
    on_evict: Any
    victim: Any
