"""SIEVE eviction policy (Zhang et al., NSDI 2024, "SIEVE is simpler than LRU", algorithm 1).

The experts of a slot group are in a queue in order of insertion. A hit sets the expert's visited
bit, and does not move the expert. A pointer, the hand, goes from the oldest expert to the newest
and around again. It clears bits that are set, and the first expert whose bit is clear is the
victim. Pinned experts are skipped, and their bits do not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class SieveState(NamedTuple):
    """State arrays of the SIEVE eviction policy, for P experts and G slot groups."""

    queue: Lists  # one a group, the newest in front
    visited: NDArray[np.bool_]  # [P]
    hand: Ints  # [G] the node of the hand; a head means the oldest piece


def build_state(setup: PolicySetup) -> SieveState:
    pieces, groups = setup.pieces, setup.groups
    hand = np.arange(pieces, pieces + groups, dtype=np.int64)
    return SieveState(lists.empty(pieces, groups), np.zeros(pieces, np.bool_), hand)


@compiled
def on_hit(cache: CacheState, state: SieveState, piece: int, now: LogicalTime) -> None:
    state.visited[piece] = True


@compiled
def on_insert(cache: CacheState, state: SieveState, piece: int, now: LogicalTime) -> None:
    state.visited[piece] = False
    lists.push(state.queue, cache.slot_of.size + cache.group_of[piece], piece)


@compiled
def on_evict(cache: CacheState, state: SieveState, piece: int, now: LogicalTime) -> None:
    group = cache.group_of[piece]
    if state.hand[group] == piece:
        state.hand[group] = state.queue.before[piece]
    lists.unlink(state.queue, piece)


@compiled
def victim(cache: CacheState, state: SieveState, group: int, piece: int, now: LogicalTime) -> int:
    head = cache.slot_of.size + group
    node, rounds = state.hand[group], 0
    while rounds < 3:  # in the second round all bits are clear, except those of pinned pieces
        if node == head:
            rounds += 1
            node = state.queue.before[head]
            if node == head:
                return -1
        if cache.pinned[node] == 0:
            if not state.visited[node]:
                state.hand[group] = node
                return int(node)
            state.visited[node] = False
        node = state.queue.before[node]
    return -1


sieve = Policy("sieve", build_state, victim, on_hit, on_insert, on_evict)
