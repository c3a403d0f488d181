"""LFU: evict the piece with the fewest requests since the start; counts survive eviction.

Ties go to the piece requested least recently.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Policy, State, compiled


def memory(pieces: int, groups: int, seed: int) -> tuple[Ints, Floats]:
    """`ints`: requests of each piece, the serial number of its last request, a counter."""
    return np.zeros(2 * pieces + 1, np.int64), np.empty(0)


@compiled
def on_hit(state: State, piece: int, now: int) -> None:
    pieces = state.slot_of.size
    state.ints[2 * pieces] += 1
    state.ints[piece] += 1
    state.ints[pieces + piece] = state.ints[2 * pieces]


@compiled
def on_insert(state: State, piece: int, now: int) -> None:
    on_hit(state, piece, now)


@compiled
def on_evict(state: State, piece: int, now: int) -> None:
    pass


@compiled
def victim(state: State, group: int, now: int) -> int:
    pieces = state.slot_of.size
    best = -1
    for slot in range(state.first[group], state.first[group + 1]):
        piece = state.piece_in[slot]
        if piece < 0 or state.pinned[piece] > 0:
            continue
        if best >= 0:
            fewer = state.ints[piece] - state.ints[best]
            older = state.ints[pieces + piece] - state.ints[pieces + best]
            if fewer > 0 or (fewer == 0 and older > 0):
                continue
        best = piece
    return best


lfu = Policy("lfu", memory, on_hit, on_insert, on_evict, victim)
