"""S3-FIFO eviction policy: small, main and ghost queues (Yang et al., SOSP 2023).

Source: "FIFO queues are all you need for cache eviction", section 4, algorithm 1. Each slot group
has three FIFO queues: S (small) for new experts, with a tenth of the slots; M (main); and G
(ghost), the ids of experts evicted from S, at most as many as M has slots. A hit raises an expert's
frequency, to 3 at most. A missed expert enters M if its id is in G, else S. If S is full, its
oldest expert leaves S: if it was hit more than once, it enters M with frequency 0, and the next one
is considered; else it is evicted, and its id enters G. If S is not full, the oldest expert of M is
considered: if its frequency is above 0, the frequency falls by 1 and the expert becomes the newest
of M; else it is evicted. Pinned experts are skipped.
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
    """State arrays of the S3-FIFO eviction policy, for P experts."""

    queues: Queues  # S, M and G
    frequency: Ints  # [P]
    share: Floats  # of slots for S


def build_state(setup: PolicySetup) -> S3FifoState:
    return S3FifoState(
        lists.empty_queues(setup.pieces, setup.groups),
        np.zeros(setup.pieces, np.int64),
        np.array([setup.options["small"]]),
    )


@compiled
def small_slots(cache: CacheState, state: S3FifoState, group: int) -> int:
    """Compute the number of a slot group's slots for S3-FIFO's small queue, at least 1."""
    slots = cache.first[group + 1] - cache.first[group]
    return max(1, int(slots * state.share[0]))


@compiled
def on_hit(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    state.frequency[piece] = min(state.frequency[piece] + 1, MOST)


@compiled
def on_insert(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    state.frequency[piece] = 0
    queues, group, queue = state.queues, cache.group_of[piece], S
    if queues.queue_of[piece] == G:
        lists.dequeue(queues, group, piece)
        queue = M
    lists.enqueue(queues, group, piece, queue)


@compiled
def on_evict(cache: CacheState, state: S3FifoState, piece: int, now: LogicalTime) -> None:
    queues, group, queue = state.queues, cache.group_of[piece], state.queues.queue_of[piece]
    lists.dequeue(queues, group, piece)
    if queue == S:
        lists.enqueue(queues, group, piece, G)
        room = cache.first[group + 1] - cache.first[group] - small_slots(cache, state, group)
        if queues.size[group, G] > room:
            lists.drop_oldest(queues, group, G)


@compiled
def from_small(cache: CacheState, state: S3FifoState, group: int) -> int:
    """Choose a victim in S3-FIFO's small queue.

    The victim is the oldest unpinned expert that was hit fewer than two times, or -1. Older
    unpinned experts are moved to the main queue.
    """
    queues, head = state.queues, lists.head_of(state.queues, group, S)
    piece = queues.lists.before[head]
    while piece != head:
        newer = queues.lists.before[piece]
        if cache.pinned[piece] == 0:
            if state.frequency[piece] < 2:
                return int(piece)
            state.frequency[piece] = 0
            lists.dequeue(queues, group, piece)
            lists.enqueue(queues, group, piece, M)
        piece = newer
    return -1


@compiled
def from_main(cache: CacheState, state: S3FifoState, group: int) -> int:
    """Choose a victim in S3-FIFO's main queue.

    The oldest unpinned expert is the victim if its frequency is 0. Otherwise its frequency falls by
    1, and it becomes the newest expert of the queue. The result is -1 if all are pinned.
    """
    piece = lists.oldest_unpinned(state.queues, group, M, cache)
    while piece >= 0 and state.frequency[piece] > 0:
        state.frequency[piece] -= 1
        lists.dequeue(state.queues, group, piece)
        lists.enqueue(state.queues, group, piece, M)
        piece = lists.oldest_unpinned(state.queues, group, M, cache)
    return int(piece)


@compiled
def victim(cache: CacheState, state: S3FifoState, group: int, piece: int, now: LogicalTime) -> int:
    chosen = -1
    if state.queues.size[group, S] >= small_slots(cache, state, group):
        chosen = from_small(cache, state, group)
    if chosen < 0:
        chosen = from_main(cache, state, group)
    if chosen < 0:
        chosen = lists.oldest_unpinned(state.queues, group, S, cache)
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
