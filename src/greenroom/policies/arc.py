"""ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache", fig. 4).

Of each group's c slots some hold T1, requested once lately, the others T2, requested more often;
the ghosts B1 and B2 remember what T1 and T2 lost. A miss that B1 remembers raises the target p of
T1's size, one that B2 remembers lowers it. T1 gives the victim where it is larger than p, else T2:
always its oldest. T1 and B1 together never exceed c, all four 2c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.policy import Floats, Now, Policy, Setup, State, compiled
from greenroom.policies.helpers import lists
from greenroom.policies.helpers.lists import Queues

T1, T2, B1, B2 = 0, 1, 2, 3


class Own(NamedTuple):
    queues: Queues  # T1, T2, B1 and B2
    target: Floats  # [groups] p


def memory(setup: Setup) -> Own:
    return Own(lists.empty_queues(setup), np.zeros(setup.groups))


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    group = state.group_of[piece]
    lists.leave(own.queues, group, piece)
    lists.enter(own.queues, group, piece, T2)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    queues, group = own.queues, state.group_of[piece]
    if queues.inside[piece] >= 0:
        on_hit(state, own, piece, now)
        return
    lists.enter(queues, group, piece, T1)
    size, slots = queues.size[group], state.first[group + 1] - state.first[group]
    if size[T1] + size[B1] > slots and size[B1] > 0:
        lists.forget_oldest(queues, group, B1)
    if size.sum() > 2 * slots and size[B2] > 0:
        lists.forget_oldest(queues, group, B2)


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    group, ghost = state.group_of[piece], B1 if own.queues.inside[piece] == T1 else B2
    lists.leave(own.queues, group, piece)
    lists.enter(own.queues, group, piece, ghost)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    queues, size = own.queues, own.queues.size[group]
    slots = state.first[group + 1] - state.first[group]
    ghost = queues.inside[piece] if piece >= 0 else -1
    if ghost == B1:
        own.target[group] = min(own.target[group] + max(size[B2] / size[B1], 1.0), float(slots))
    elif ghost == B2:
        own.target[group] = max(own.target[group] - max(size[B1] / size[B2], 1.0), 0.0)
    target = own.target[group]
    full = ghost < 0 and size[T1] >= slots  # case IV A: there is nothing but T1
    once = size[T1] > 0 and (full or size[T1] > target or (ghost == B2 and size[T1] == target))
    chosen = lists.oldest(queues, group, T1 if once else T2, state)
    if chosen < 0:
        chosen = lists.oldest(queues, group, T2 if once else T1, state)
    return int(chosen)


arc = Policy("arc", memory, victim, on_hit, on_insert, on_evict)
