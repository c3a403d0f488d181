"""Marking, randomised (Fiat et al., 1991, "Competitive paging algorithms").

A requested piece is marked. The victim is any piece without a mark, each as likely as the others;
where none is left that may be evicted, a new phase begins: all marks are taken away first. `seed`
makes it repeatable.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Now, Policy, Setup, State, compiled
from greenroom.policies.dice import Dice, below, dice


class Own(NamedTuple):
    marked: Ints  # [P] the phase in which the piece was requested last
    phase: Ints  # [G]
    dice: Dice


def memory(setup: Setup) -> Own:
    marked, phase = np.zeros(setup.pieces, np.int64), np.ones(setup.groups, np.int64)
    return Own(marked, phase, dice(setup.seed))


@compiled
def mark(state: State, own: Own, piece: int, now: Now) -> None:
    own.marked[piece] = own.phase[state.group_of[piece]]


@compiled
def free_to_go(state: State, own: Own, group: int, slot: int) -> bool:
    piece = state.piece_in[slot]
    return bool(piece >= 0 and own.marked[piece] != own.phase[group] and state.pinned[piece] == 0)


@compiled
def draw(state: State, own: Own, group: int) -> int:
    """A piece without mark or pin, or -1. A few throws at all slots mostly find one."""
    first, slots = state.first[group], state.first[group + 1] - state.first[group]
    for _ in range(8):
        slot = first + below(own.dice, slots)
        if free_to_go(state, own, group, slot):
            return int(state.piece_in[slot])
    free = 0
    for slot in range(first, first + slots):
        free += free_to_go(state, own, group, slot)
    if free == 0:
        return -1
    skip = below(own.dice, free)
    for slot in range(first, first + slots):
        if free_to_go(state, own, group, slot):
            if skip == 0:
                return int(state.piece_in[slot])
            skip -= 1
    return -1


@compiled
def victim(state: State, own: Own, group: int, piece: int, now: Now) -> int:
    chosen = draw(state, own, group)
    if chosen < 0:
        own.phase[group] += 1
        chosen = draw(state, own, group)
    return int(chosen)


marking = Policy("marking", memory, victim, mark, mark)
