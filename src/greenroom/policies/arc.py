"""ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache", fig. 4).

Of each group's c slots some hold T1, requested once lately, the others T2, requested more often;
the ghosts B1 and B2 remember what T1 and T2 lost. A miss that B1 remembers raises the target p of
T1's size, one that B2 remembers lowers it. T1 gives the victim where it is larger than p, else T2:
always its oldest. T1 and B1 together never exceed c, all four 2c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.policy import CacheState, Floats, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues

T1, T2, B1, B2 = 0, 1, 2, 3


class ArcState(NamedTuple):
    queues: Queues  # T1, T2, B1 and B2
    target: Floats  # [groups] p


def build_state(setup: PolicySetup) -> ArcState:
    return ArcState(lists.empty_queues(setup), np.zeros(setup.groups))


@compiled
def on_hit(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    group = cache.group_of[piece]
    lists.leave(state.queues, group, piece)
    lists.enter(state.queues, group, piece, T2)


@compiled
def on_insert(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    queues, group = state.queues, cache.group_of[piece]
    if queues.inside[piece] >= 0:
        on_hit(cache, state, piece, now)
        return
    lists.enter(queues, group, piece, T1)
    size, slots = queues.size[group], cache.first[group + 1] - cache.first[group]
    if size[T1] + size[B1] > slots and size[B1] > 0:
        lists.forget_oldest(queues, group, B1)
    if size.sum() > 2 * slots and size[B2] > 0:
        lists.forget_oldest(queues, group, B2)


@compiled
def on_evict(cache: CacheState, state: ArcState, piece: int, now: LogicalTime) -> None:
    group, ghost = cache.group_of[piece], B1 if state.queues.inside[piece] == T1 else B2
    lists.leave(state.queues, group, piece)
    lists.enter(state.queues, group, piece, ghost)


@compiled
def victim(cache: CacheState, state: ArcState, group: int, piece: int, now: LogicalTime) -> int:
    queues, size = state.queues, state.queues.size[group]
    slots = cache.first[group + 1] - cache.first[group]
    ghost = queues.inside[piece] if piece >= 0 else -1
    if ghost == B1:
        state.target[group] = min(state.target[group] + max(size[B2] / size[B1], 1.0), float(slots))
    elif ghost == B2:
        state.target[group] = max(state.target[group] - max(size[B1] / size[B2], 1.0), 0.0)
    target = state.target[group]
    full = ghost < 0 and size[T1] >= slots  # case IV A: there is nothing but T1
    once = size[T1] > 0 and (full or size[T1] > target or (ghost == B2 and size[T1] == target))
    chosen = lists.oldest(queues, group, T1 if once else T2, cache)
    if chosen < 0:
        chosen = lists.oldest(queues, group, T2 if once else T1, cache)
    return int(chosen)


arc = Policy("arc", build_state, victim, on_hit, on_insert, on_evict)
