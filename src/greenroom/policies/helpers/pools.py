"""Pools of cached experts for random draws, one for each slot group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, PolicySetup, compiled


class Pools(NamedTuple):
    """Arrays of the pools of P cached experts, one for each of G slot groups.

    The pool of group g is `members[base[g] : base[g] + size[g]]`.
    """

    members: Ints  # [P]
    at: Ints  # [P] a piece's position in its group's pool, or -1
    base: Ints  # [G]
    size: Ints  # [G]
    random_state: NDArray[np.uint64]  # [1] splitmix64, equal on every platform


def empty(setup: PolicySetup) -> Pools:
    """Create empty pools of experts, each with room for all experts of its slot group."""
    sizes = np.bincount(setup.group_of, minlength=setup.groups)
    return Pools(
        members=np.zeros(setup.pieces, np.int64),
        at=np.full(setup.pieces, -1, np.int64),
        base=(np.cumsum(sizes) - sizes).astype(np.int64),
        size=np.zeros(setup.groups, np.int64),
        random_state=np.array([setup.seed & 0xFFFFFFFFFFFFFFFF], np.uint64),
    )


@compiled
def add(pools: Pools, group: int, piece: int) -> None:
    """Add an expert, not yet a member, to the pool of its slot group."""
    i = pools.size[group]
    pools.members[pools.base[group] + i] = piece
    pools.at[piece] = i
    pools.size[group] += 1


@compiled
def swap(pools: Pools, group: int, i: int, j: int) -> None:
    """Exchange the members at positions `i` and `j` of a slot group's pool."""
    base = pools.base[group]
    a, b = pools.members[base + i], pools.members[base + j]
    pools.members[base + i], pools.members[base + j] = b, a
    pools.at[a], pools.at[b] = j, i


@compiled
def discard(pools: Pools, group: int, piece: int) -> None:
    """Remove an expert from the pool of its slot group, if it is a member."""
    if pools.at[piece] >= 0:
        swap(pools, group, pools.at[piece], pools.size[group] - 1)
        pools.size[group] -= 1
        pools.at[piece] = -1


@compiled
def random_below(random_state: Any, n: int) -> int:
    """Draw a random integer from 0 to `n` - 1; `n` must be below 2 ** 32."""
    random_state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random_state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return int(((z >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@compiled
def draw(pools: Pools, group: int, cache: CacheState) -> int:
    """Draw an unpinned expert of a pool, each with equal probability; -1 if none.

    The expert stays in the pool.
    """
    base, left = pools.base[group], pools.size[group]
    while left > 0:
        i = random_below(pools.random_state, left)
        piece = pools.members[base + i]
        if cache.pinned[piece] == 0:
            return int(piece)
        left -= 1  # move pinned members behind those that may still be drawn
        swap(pools, group, i, left)
    return -1
