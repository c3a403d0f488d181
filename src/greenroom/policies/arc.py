"""ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache", fig. 4).

Each group of c slots has two queues of experts: T1 (requested once lately) and T2 (requested more
often). The ghost queues B1 and B2 have the ids of experts evicted from T1 and T2. A miss of an
expert in B1 raises p, the target size of T1, and a miss of one in B2 lowers it. The victim is the
oldest expert of T1 if T1 is larger than p, else of T2. T1 and B1 together never have more than c
experts, and all four queues never more than 2c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.policy import CacheState, Floats, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues

T1, T2, B1, B2 = 0, 1, 2, 3


class ArcState(NamedTuple):
    """State arrays of the ARC eviction policy: its four queues and the target size of T1."""

    queues: Queues  # T1, T2, B1 and B2
    target: Floats  # [groups] p


def build_state(setup: PolicySetup) -> ArcState:
    return ArcState(lists.empty_queues(setup.pieces, setup.groups), np.zeros(setup.groups))


@compiled
def promote(queues: Queues, group: int, piece: int) -> None:
    """Move an expert of any of ARC's queues to the front of T2."""
    lists.dequeue(queues, group, piece)
    lists.enqueue(queues, group, piece, T2)


@compiled
def insert(queues: Queues, group: int, piece: int, slots: int) -> None:
    """Put an inserted expert into T2 if a ghost queue has it, else into T1; trim the ghosts."""
    if queues.queue_of[piece] >= 0:
        promote(queues, group, piece)
        return
    lists.enqueue(queues, group, piece, T1)
    size = queues.size[group]
    while size[T1] + size[B1] > slots and size[B1] > 0:
        lists.drop_oldest(queues, group, B1)
    while size.sum() > 2 * slots and size[B2] > 0:
        lists.drop_oldest(queues, group, B2)


@compiled
def demote(queues: Queues, group: int, piece: int) -> None:
    """Move an evicted expert from T1 to B1, or from T2 to B2."""
    ghost = B1 if queues.queue_of[piece] == T1 else B2
    lists.dequeue(queues, group, piece)
    lists.enqueue(queues, group, piece, ghost)


@compiled
def adapt(queues: Queues, target: Floats, group: int, ghost: int, slots: int) -> None:
    """Adapt p, the target size of T1, to a miss of a ghost queue's expert."""
    size = queues.size[group]
    if ghost == B1:
        target[group] = min(target[group] + max(size[B2] / size[B1], 1.0), float(slots))
    elif ghost == B2:
        target[group] = max(target[group] - max(size[B1] / size[B2], 1.0), 0.0)


@compiled
def oldest(
    queues: Queues, target: Floats, group: int, ghost: int, slots: int, cache: CacheState
) -> int:
    """Choose ARC's victim: the oldest unpinned expert of T1 or T2; -1 if none.

    `ghost` is the ghost queue of the expert that needs the slot, or -1.
    """
    size = queues.size[group]
    full = ghost < 0 and size[T1] >= slots  # case IV A: only T1 has pieces
    above = size[T1] > target[group] or (ghost == B2 and size[T1] == target[group])
    once = size[T1] > 0 and (full or above)
    chosen = lists.oldest_unpinned(queues, group, T1 if once else T2, cache)
    if chosen < 0:
        chosen = lists.oldest_unpinned(queues, group, T2 if once else T1, cache)
    return int(chosen)


@compiled
def on_hit(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    promote(state.queues, cache.group_of[piece], piece)


@compiled
def on_insert(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    group = cache.group_of[piece]
    insert(state.queues, group, piece, cache.first[group + 1] - cache.first[group])


@compiled
def on_evict(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    demote(state.queues, cache.group_of[piece], piece)


@compiled
def victim(cache: CacheState, state: ArcState, group: int, piece: int, now: LogicalTime) -> int:
    slots = cache.first[group + 1] - cache.first[group]
    ghost = state.queues.queue_of[piece] if piece >= 0 else -1
    adapt(state.queues, state.target, group, ghost, slots)
    return int(oldest(state.queues, state.target, group, ghost, slots, cache))


arc = Policy("arc", build_state, victim, on_hit, on_insert, on_evict)
