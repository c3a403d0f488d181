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
from greenroom.core.policy import Floats, Now, Option, Policy, Setup, State, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues

S, M, G = 0, 1, 2
MOST = 3  # frequency: two bits


class Own(NamedTuple):
    queues: Queues  # S, M and G
    frequency: Ints  # [P]
    share: Floats  # of the slots that are S's


def memory(setup: Setup) -> Own:
    return Own(
        lists.empty_queues(setup),
        np.zeros(setup.pieces, np.int64),
        np.array([setup.options["small"]]),
    )


@compiled
def small(state: State, own: Own, group: int) -> int:
    """Slots that are S's share, at least one."""
    slots = state.first[group + 1] - state.first[group]
    return max(1, int(slots * own.share[0]))


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    own.frequency[piece] = min(own.frequency[piece] + 1, MOST)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    own.frequency[piece] = 0
    queues, group, queue = own.queues, state.group_of[piece], S
    if queues.inside[piece] == G:
        lists.leave(queues, group, piece)
        queue = M
    lists.enter(queues, group, piece, queue)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    queues, group, queue = own.queues, state.group_of[piece], own.queues.inside[piece]
    lists.leave(queues, group, piece)
    if queue == S:
        lists.enter(queues, group, piece, G)
        room = state.first[group + 1] - state.first[group] - small(state, own, group)
        if queues.size[group, G] > room:
            lists.forget_oldest(queues, group, G)


@compiled
def from_small(state: State, own: Own, group: int) -> int:
    """S's oldest piece that was not hit twice; those that were move to M. -1: none is left."""
    queues, head = own.queues, lists.head_of(own.queues, group, S)
    piece = queues.lists.before[head]
    while piece != head:
        newer = queues.lists.before[piece]
        if state.pinned[piece] == 0:
            if own.frequency[piece] < 2:
                return int(piece)
            own.frequency[piece] = 0
            lists.leave(queues, group, piece)
            lists.enter(queues, group, piece, M)
        piece = newer
    return -1


@compiled
def from_main(state: State, own: Own, group: int) -> int:
    """M's oldest piece that was not hit since it last came by, or -1."""
    piece = lists.oldest(own.queues, group, M, state)
    while piece >= 0 and own.frequency[piece] > 0:
        own.frequency[piece] -= 1
        lists.leave(own.queues, group, piece)
        lists.enter(own.queues, group, piece, M)
        piece = lists.oldest(own.queues, group, M, state)
    return int(piece)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    chosen = -1
    if own.queues.size[group, S] >= small(state, own, group):
        chosen = from_small(state, own, group)
    if chosen < 0:
        chosen = from_main(state, own, group)
    if chosen < 0:
        chosen = lists.oldest(own.queues, group, S, state)
    return int(chosen)


s3fifo = Policy(
    "s3fifo",
    memory,
    victim,
    on_hit,
    on_insert,
    on_evict,
    options=(Option("small", 0.1, "share of the slots that the small queue has", 0, 1),),
)
