"""Other sizes for the cache: which piece moves to which slot."""

from __future__ import annotations

import numpy as np

from greenroom.core.cache import Cache
from greenroom.core.events import Move
from greenroom.core.pieces import Ints, Pieces


def reshape(cache: Cache, place: Ints, capacity: int) -> tuple[Ints, list[Move]]:
    """Give the cache `capacity` slots, none of them on loan; nothing may be moving.

    `place[s]` is the tier's slot that the cache's slot s stands for, on the same device. Victims
    go by the policy; a resident moves only where the tier no longer has its slot. Returns the new
    `place`, and the moves, none of which overwrites another's source.
    """
    before = {piece: int(place[cache.state.slot_of[piece]]) for piece in cache.residents().tolist()}
    cache.resize(capacity)
    state = cache.state
    fresh = np.full(capacity, -1, np.int64)
    there = first_places(cache.pieces, capacity)
    homeless, known = [], set(there.tolist())
    for piece in cache.residents().tolist():
        if before[piece] in known:
            fresh[state.slot_of[piece]] = before[piece]
        else:
            homeless.append(piece)
    devices, taken = cache.pieces.devices, set(fresh.tolist())
    free: list[list[int]] = [[] for _ in range(devices)]
    for slot in there[::-1].tolist():
        if slot not in taken:
            free[slot % devices].append(slot)
    moves = []
    for piece in homeless:
        target = free[before[piece] % devices].pop()
        fresh[state.slot_of[piece]] = target
        moves.append(Move(piece, before[piece], target))
    for slot in np.flatnonzero(fresh < 0).tolist():
        fresh[slot] = free[int(there[slot]) % devices].pop()
    return fresh, moves


def first_places(pieces: Pieces, capacity: int) -> Ints:
    """The tier's slot for each of the cache's, [capacity], before anything has moved."""
    devices = pieces.devices
    each = [np.arange(n) * devices + d for d, n in enumerate(pieces.shares(capacity))]
    return np.concatenate(each).astype(np.int64)
