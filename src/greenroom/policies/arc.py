"""ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache", fig. 4).

Of each group's c slots some hold T1, requested once lately, the others T2, requested more often;
the ghosts B1 and B2 remember what T1 and T2 lost. A miss that B1 remembers raises the target p of
T1's size, one that B2 remembers lowers it. T1 gives the victim where it is larger than p, else T2:
always its oldest. T1 and B1 together never exceed c, all four 2c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Now, Policy, Setup, State, compiled
from greenroom.policies import lists
from greenroom.policies.lists import Lists

T1, T2, B1, B2 = 0, 1, 2, 3


class Own(NamedTuple):
    lists: Lists  # T1, T2, B1 and B2 of each group, the newest in front
    inside: Ints  # [P] T1, T2, B1, B2 or -1
    size: Ints  # [4 * groups]
    target: Floats  # [groups] p


def memory(setup: Setup) -> Own:
    return Own(
        lists.empty(setup.pieces, 4 * setup.groups),
        np.full(setup.pieces, -1, np.int64),
        np.zeros(4 * setup.groups, np.int64),
        np.zeros(setup.groups),
    )


@compiled
def leave(state: State, own: Own, piece: int) -> None:
    """Take a piece out of its list."""
    own.size[4 * state.group_of[piece] + own.inside[piece]] -= 1
    own.inside[piece] = -1
    lists.unlink(own.lists, piece)


@compiled
def enter(state: State, own: Own, piece: int, which: int) -> None:
    """Put a piece at the front of a list of its group."""
    i = 4 * state.group_of[piece] + which
    own.size[i] += 1
    own.inside[piece] = which
    lists.push(own.lists, state.slot_of.size + i, piece)


@compiled
def on_hit(state: State, own: Own, piece: int, now: Now) -> None:
    leave(state, own, piece)
    enter(state, own, piece, T2)


@compiled
def on_insert(state: State, own: Own, piece: int, now: Now) -> None:
    if own.inside[piece] >= 0:
        on_hit(state, own, piece, now)
        return
    enter(state, own, piece, T1)
    group = state.group_of[piece]
    size = own.size[4 * group : 4 * group + 4]
    head = state.slot_of.size + 4 * group
    slots = state.first[group + 1] - state.first[group]
    if size[T1] + size[B1] > slots and size[B1] > 0:
        leave(state, own, own.lists.before[head + B1])
    if size.sum() > 2 * slots and size[B2] > 0:
        leave(state, own, own.lists.before[head + B2])


@compiled
def on_evict(state: State, own: Own, piece: int, now: Now) -> None:
    ghost = B1 if own.inside[piece] == T1 else B2
    leave(state, own, piece)
    enter(state, own, piece, ghost)


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    size = own.size[4 * group : 4 * group + 4]
    slots = state.first[group + 1] - state.first[group]
    ghost = own.inside[piece] if piece >= 0 else -1
    if ghost == B1:
        own.target[group] = min(own.target[group] + max(size[B2] / size[B1], 1.0), float(slots))
    elif ghost == B2:
        own.target[group] = max(own.target[group] - max(size[B1] / size[B2], 1.0), 0.0)
    target = own.target[group]
    full = ghost < 0 and size[T1] >= slots  # case IV A: there is nothing but T1
    once = size[T1] > 0 and (full or size[T1] > target or (ghost == B2 and size[T1] == target))
    head = state.slot_of.size + 4 * group
    chosen = lists.last(own.lists, head + (T1 if once else T2), state)
    if chosen < 0:
        chosen = lists.last(own.lists, head + (T2 if once else T1), state)
    return int(chosen)


arc = Policy("arc", memory, victim, on_hit, on_insert, on_evict)
