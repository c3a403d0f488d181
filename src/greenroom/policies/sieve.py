"""SIEVE (Zhang et al., NSDI 2024, "SIEVE is simpler than LRU", section 3, algorithm 1).

A queue in order of arrival. A hit sets the piece's visited bit and moves nothing. A hand goes from
the oldest to the newest and around again: it clears the bits that are set and evicts the first
piece whose bit is not. Pinned pieces are passed over, their bits untouched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import Now, Policy, Setup, State, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Lists


class Own(NamedTuple):
    queue: Lists  # one a group, the newest in front
    visited: NDArray[np.bool_]  # [P]
    hand: Ints  # [G] the node where the hand is; a head: at the beginning


def memory(setup: Setup) -> Own:
    pieces, groups = setup.pieces, setup.groups
    hand = np.arange(pieces, pieces + groups, dtype=np.int64)
    return Own(lists.empty(pieces, groups), np.zeros(pieces, np.bool_), hand)


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    own.visited[piece] = True


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.visited[piece] = False
    lists.push(own.queue, state.slot_of.size + state.group_of[piece], piece)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    group = state.group_of[piece]
    if own.hand[group] == piece:
        own.hand[group] = own.queue.before[piece]
    lists.unlink(own.queue, piece)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    head = state.slot_of.size + group
    node, rounds = own.hand[group], 0
    while rounds < 3:  # the second time around all bits are clear, but for pinned pieces
        if node == head:
            rounds += 1
            node = own.queue.before[head]
            if node == head:
                return -1
        if state.pinned[node] == 0:
            if not own.visited[node]:
                own.hand[group] = node
                return int(node)
            own.visited[node] = False
        node = own.queue.before[node]
    return -1


sieve = Policy("sieve", memory, victim, on_hit, on_insert, on_evict)
