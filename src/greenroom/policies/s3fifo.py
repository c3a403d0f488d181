"""S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction", section 4,
algorithm 1).

Three FIFO queues a group: S (small), with a tenth of the slots, for what is new; M (main); G
(ghost), the ids of what S gave up, as many as M has slots. A hit raises the piece's frequency, to 3
at most. A miss enters M where G remembers it, else S. While S has its share, its oldest piece goes:
to M with frequency 0 if it was hit more than once, else out and into G; else M's oldest, which goes
around once more for each time that it was hit. Pinned pieces are passed over where they stand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Floats,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    compiled,
)
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues

S, M, G = 0, 1, 2
MOST = 3  # frequency: two bits


class S3FifoState(NamedTuple):
    queues: Queues  # S, M and G
    frequency: Ints  # [P]
    share: Floats  # of the slots that are S's


def build_state(setup: PolicySetup) -> S3FifoState:
    return S3FifoState(
        lists.empty_queues(setup),
        np.zeros(setup.pieces, np.int64),
        np.array([setup.options["small"]]),
    )


@compiled
def small(cache: CacheState, state: S3FifoState, group: int) -> int:
    """Slots that are S's share, at least one."""
    slots = cache.first[group + 1] - cache.first[group]
    return max(1, int(slots * state.share[0]))


@compiled
def on_hit(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    state.frequency[piece] = min(state.frequency[piece] + 1, MOST)


@compiled
def on_insert(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    state.frequency[piece] = 0
    queues, group, queue = state.queues, cache.group_of[piece], S
    if queues.inside[piece] == G:
        lists.leave(queues, group, piece)
        queue = M
    lists.enter(queues, group, piece, queue)


@compiled
def on_evict(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    queues, group, queue = state.queues, cache.group_of[piece], state.queues.inside[piece]
    lists.leave(queues, group, piece)
    if queue == S:
        lists.enter(queues, group, piece, G)
        room = cache.first[group + 1] - cache.first[group] - small(cache, state, group)
        if queues.size[group, G] > room:
            lists.forget_oldest(queues, group, G)


@compiled
def from_small(cache: CacheState, state: S3FifoState, group: int) -> int:
    """S's oldest piece that was not hit twice; those that were move to M. -1: none is left."""
    queues, head = state.queues, lists.head_of(state.queues, group, S)
    piece = queues.lists.before[head]
    while piece != head:
        newer = queues.lists.before[piece]
        if cache.pinned[piece] == 0:
            if state.frequency[piece] < 2:
                return int(piece)
            state.frequency[piece] = 0
            lists.leave(queues, group, piece)
            lists.enter(queues, group, piece, M)
        piece = newer
    return -1


@compiled
def from_main(cache: CacheState, state: S3FifoState, group: int) -> int:
    """M's oldest piece that was not hit since it last came by, or -1."""
    piece = lists.oldest(state.queues, group, M, cache)
    while piece >= 0 and state.frequency[piece] > 0:
        state.frequency[piece] -= 1
        lists.leave(state.queues, group, piece)
        lists.enter(state.queues, group, piece, M)
        piece = lists.oldest(state.queues, group, M, cache)
    return int(piece)


@compiled
def victim(cache: CacheState, state: S3FifoState, group: int, piece: int, now: LogicalTime) -> int:
    chosen = -1
    if state.queues.size[group, S] >= small(cache, state, group):
        chosen = from_small(cache, state, group)
    if chosen < 0:
        chosen = from_main(cache, state, group)
    if chosen < 0:
        chosen = lists.oldest(state.queues, group, S, cache)
    return int(chosen)


s3fifo = Policy(
    "s3fifo",
    build_state,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(PolicyOption("small", 0.1, "share of the slots that the small queue has", 0, 1),),
)
