"""How a step is served, for any policy: templates that are compiled with a policy's functions.

`with_parts` puts the policy's own functions in place of the names below, and compiled ones in place
of `evict` and `miss`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Ids, LogicalTime, Rows, Weights

Flags = NDArray[np.bool_]
BYPASS, STUCK = -1, -2  # in place of a slot: not brought in; nothing can be evicted

# A policy's functions.
victim: Any = None
on_hit: Any = None
on_insert: Any = None
on_evict: Any = None
on_step: Any = None
on_request: Any = None
bypass = False


def evict(state: CacheState, own: Any, piece: int, now: LogicalTime) -> None:
    slot, group = state.slot_of[piece], state.group_of[piece]
    on_evict(state, own, piece, now)
    state.slot_of[piece] = -1
    state.piece_in[slot] = -1
    state.free[state.first[group] + state.free_count[group]] = slot
    state.free_count[group] += 1


def miss(state: CacheState, own: Any, piece: int, now: LogicalTime) -> tuple[int, int]:
    """Find a slot for a piece; what had it is evicted. (slot, evicted piece or -1)."""
    if bypass:
        return BYPASS, -1
    group = state.group_of[piece]
    evicted = -1
    if state.free_count[group] == 0:
        evicted = victim(state, own, group, piece, now)
        if evicted < 0:
            return STUCK, -1
        on_evict(state, own, evicted, now)
        slot = state.slot_of[evicted]
        state.slot_of[evicted] = -1
    else:
        state.free_count[group] -= 1
        slot = state.free[state.first[group] + state.free_count[group]]
    state.slot_of[piece], state.piece_in[slot] = slot, piece
    on_insert(state, own, piece, now)
    return slot, evicted


def admit(state: CacheState, own: Any, piece: int, now: LogicalTime) -> int:
    """Take a piece in that is there already. Its slot, or BYPASS."""
    slot: int = miss(state, own, piece, now)[0]
    return slot


def borrow(state: CacheState, own: Any, piece: int, now: LogicalTime) -> tuple[int, int]:
    """Take a slot out of the cache for a piece that the policy is not told of.

    (slot, evicted piece or -1); the slot is -1 where nothing can be evicted.
    """
    group, evicted = state.group_of[piece], -1
    if state.free_count[group] == 0:
        evicted = int(victim(state, own, group, piece, now))
        if evicted < 0:
            return -1, -1
        evict(state, own, evicted, now)
    state.free_count[group] -= 1
    return state.free[state.first[group] + state.free_count[group]], evicted


def serve(
    state: CacheState,
    own: Any,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    steps: Ints,
    pin: bool,
    fill: int,
    aside: Flags,
    out: Ints,
) -> int:
    """Request the pieces of consecutive steps one by one, of which all but the last are all hits.

    `steps` [S, 7] are each one's `Now`, whether a prompt begins with it, and its pieces. The rest
    is of the last step: out [3, n] are slots, hits, evicted. How many missed; STUCK where nothing
    can be evicted.

    With `fill` >= 0 so many misses are taken in, where slots are free; nothing is evicted, and
    the others pass by. So do misses that are `aside` ([n], or empty).
    """
    begin, missed, last = 0, 0, steps.shape[0] - 1
    for s in range(last + 1):
        end = begin + steps[s, 6]
        now = LogicalTime(steps[s, 0], steps[s, 1], steps[s, 2], steps[s, 3], steps[s, 4])
        if steps[s, 5]:
            on_request(state, own, now)
        on_step(state, own, pieces[begin:end], rows, weights, now)
        if pin and s == last:
            for piece in pieces[begin:end]:
                state.pinned[piece] += 1
        for i in range(end - begin):
            piece = pieces[begin + i]
            at = LogicalTime(now.clock, now.token, now.request, now.layer, now.index + i)
            slot = state.slot_of[piece]
            if slot >= 0:
                on_hit(state, own, piece, at)
            if s < last:
                continue
            out[0, i], out[1, i], out[2, i] = slot, slot >= 0, -1
            if slot >= 0:
                continue
            missed += 1
            if aside.size and aside[i]:
                out[0, i] = BYPASS
                continue
            if fill >= 0:
                if fill == 0 or state.free_count[state.group_of[piece]] == 0:
                    out[0, i] = BYPASS
                    continue
                fill -= 1
            out[0, i], out[2, i] = miss(state, own, piece, at)
            if out[0, i] == STUCK:
                return STUCK
        begin = end
    return missed


def evict_victim(state: CacheState, own: Any, group: int, now: LogicalTime) -> int:
    """Evict the policy's victim of a group. The piece, or -1 where all are pinned."""
    piece = int(victim(state, own, group, -1, now))
    if piece >= 0:
        evict(state, own, piece, now)
    return piece
