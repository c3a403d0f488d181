"""Templates of the expert cache's functions, which are compiled with an eviction policy's.

`bind` copies these functions with other globals: in place of `victim`, `on_hit` and the other names
below, the copies call the policy's functions. A piece is an unsplit expert or the top segment of a
split one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, Ids, LogicalTime, Rows, Weights

Flags = NDArray[np.bool_]
BYPASS, STUCK = -1, -2  # instead of a slot: not inserted; nothing can be evicted
ELSEWHERE = -3  # instead of misses: they cannot be loaded at once

# A policy's functions.
victim: Any = None
on_hit: Any = None
on_insert: Any = None
on_evict: Any = None
on_step: Any = None
on_request: Any = None
bypass = False


def evict(state: CacheState, policy_state: Any, piece: int, now: LogicalTime) -> None:
    """Evict a resident expert from the cache, and report this to the eviction policy."""
    slot, slot_group = state.slot_of[piece], state.group_of[piece]
    on_evict(state, policy_state, piece, now)
    state.slot_of[piece] = -1
    state.piece_in[slot] = -1
    state.free[state.first[slot_group] + state.free_count[slot_group]] = slot
    state.free_count[slot_group] += 1


def miss(state: CacheState, policy_state: Any, piece: int, now: LogicalTime) -> tuple[int, int]:
    """Find a cache slot for an expert that has none, by eviction if needed.

    `piece` is the id of the unsplit expert or of the top segment. Returns (slot, evicted piece or
    -1). In place of a slot, BYPASS says that the policy never inserts, and STUCK that nothing can
    be evicted.
    """
    if bypass:
        return BYPASS, -1
    slot_group = state.group_of[piece]
    evicted = -1
    if state.free_count[slot_group] == 0:
        evicted = victim(state, policy_state, slot_group, piece, now)
        if evicted < 0:
            return STUCK, -1
        on_evict(state, policy_state, evicted, now)
        slot = state.slot_of[evicted]
        state.slot_of[evicted] = -1
    else:
        state.free_count[slot_group] -= 1
        slot = state.free[state.first[slot_group] + state.free_count[slot_group]]
    state.slot_of[piece], state.piece_in[slot] = slot, piece
    on_insert(state, policy_state, piece, now)
    return slot, evicted


def admit(state: CacheState, policy_state: Any, piece: int, now: LogicalTime) -> int:
    """Make an expert resident whose bytes are in a cache slot already; return the slot.

    The slot was freed just before, and is the next free one of its slot group. Returns BYPASS if
    the policy never inserts.
    """
    slot: int = miss(state, policy_state, piece, now)[0]
    return slot


def borrow(state: CacheState, policy_state: Any, piece: int, now: LogicalTime) -> tuple[int, int]:
    """Borrow a cache slot for an expert, without reporting the expert to the eviction policy.

    `piece` is the id of the unsplit expert or of the top segment. Returns (slot, evicted piece or
    -1); the slot is -1 if nothing can be evicted.
    """
    slot_group, evicted = state.group_of[piece], -1
    if state.free_count[slot_group] == 0:
        evicted = int(victim(state, policy_state, slot_group, piece, now))
        if evicted < 0:
            return -1, -1
        evict(state, policy_state, evicted, now)
    state.free_count[slot_group] -= 1
    return state.free[state.first[slot_group] + state.free_count[slot_group]], evicted


def serve(
    state: CacheState,
    policy_state: Any,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    steps: Ints,
    pin: bool,
    fill: int,
    without_slot: Flags,
    out: Ints,
) -> int:
    """Serve the cache requests of consecutive steps; all steps but the last must be hits.

    pieces: ids of the requested experts (or top segments) of all steps; n in the last step
    steps:  [S, 8], for each step: its `LogicalTime`, whether a prompt begins, number of pieces

    The other arguments are those of the last step:
    pin, rows, weights: those of `Cache.serve`, rows and weights possibly empty
    fill:         how many misses may be inserted, into free slots only; -1: no limit
    without_slot: [n] or empty; flags of misses that get no slot
    out:          [3, n]; receives slots, hits and evicted pieces

    Returns the number of misses; STUCK if nothing can be evicted.
    """
    begin, missed, last = 0, 0, steps.shape[0] - 1
    for s in range(last + 1):
        end, at = begin + steps[s, 7], steps[s]
        now = LogicalTime(at[0], at[1], at[2], at[3], at[4], at[5])
        if at[6]:
            on_request(state, policy_state, now)
        on_step(state, policy_state, pieces[begin:end], rows, weights, now)
        if pin and s == last:
            for piece in pieces[begin:end]:
                state.pinned[piece] += 1
        for i in range(end - begin):
            piece = pieces[begin + i]
            time = LogicalTime(at[0], at[1], at[2], at[3], at[4], at[5] + i)
            slot = state.slot_of[piece]
            if slot >= 0:
                on_hit(state, policy_state, piece, time)
            if s < last:
                continue
            out[0, i], out[1, i], out[2, i] = slot, slot >= 0, -1
            if slot >= 0:
                continue
            missed += 1
            if without_slot.size and without_slot[i]:
                out[0, i] = BYPASS
                continue
            if fill >= 0:
                if fill == 0 or state.free_count[state.group_of[piece]] == 0:
                    out[0, i] = BYPASS
                    continue
                fill -= 1
            out[0, i], out[2, i] = miss(state, policy_state, piece, time)
            if out[0, i] == STUCK:
                return STUCK
        begin = end
    return missed


def load(
    state: CacheState,
    policy_state: Any,
    pieces: Ids,
    step: Any,
    row: Ints,
    no_rows: Rows,
    no_weights: Weights,
    flags: Flags,
    host_slot_of: Ints,
    memory_slots: Ints,
    moved: int,
    out: Ints,
) -> int:
    """Serve a step like `serve`, if its missing experts are in host memory.

    step:         8 numbers, those of a row of `steps`
    row:          [1, 8], whose values change
    flags:        [n or more], whose values change
    host_slot_of: for each piece its slot in host memory, or -1
    memory_slots: for each cache slot its slot in memory
    moved:        how many missing pieces get slots, the first ones; -1: all
    out:          [3, n or more]; receives the missing pieces, their slots in memory and those in
                  host memory

    All pieces are of one device. The step's experts are unpinned again. Returns the number of
    misses, or STUCK. It returns ELSEWHERE, and nothing changes, if one is not in host memory or the
    step is larger than its slot group.
    """
    count, group = pieces.size, state.group_of[pieces[0]]
    if count > state.first[group + 1] - state.first[group]:
        return ELSEWHERE
    missing = 0
    for i in range(count):
        piece = pieces[i]
        if state.slot_of[piece] < 0:
            if host_slot_of[piece] < 0:
                return ELSEWHERE
            if moved >= 0:
                flags[i] = missing >= moved
            missing += 1
        elif moved >= 0:
            flags[i] = False
    for field in range(8):
        row[0, field] = step[field]
    misses: int = serve(
        state, policy_state, pieces, no_rows, no_weights, row, True, -1,
        flags[:count] if moved >= 0 else flags[:0], out,
    )  # fmt: skip
    if misses == STUCK:
        return STUCK
    missing = 0
    for i in range(count):
        piece = pieces[i]
        state.pinned[piece] -= 1
        if out[1, i] == 0:
            slot = memory_slots[out[0, i]] if out[0, i] >= 0 else BYPASS
            out[0, missing], out[1, missing], out[2, missing] = piece, slot, host_slot_of[piece]
            missing += 1
    return misses


def evict_victim(state: CacheState, policy_state: Any, slot_group: int, now: LogicalTime) -> int:
    """Evict the expert that the policy chooses from a slot group, to shrink the group.

    Returns the id of the expert, or of its top segment; -1 if everything in the group is pinned.
    """
    piece = int(victim(state, policy_state, slot_group, -1, now))
    if piece >= 0:
        evict(state, policy_state, piece, now)
    return piece
