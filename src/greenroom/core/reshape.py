"""Other sizes for the cache: which piece moves to which slot."""

from __future__ import annotations

import numpy as np

from greenroom.core.cache import Cache
from greenroom.core.events import Move
from greenroom.core.pieces import Ints


def reshape(cache: Cache, place: Ints, capacity: int) -> tuple[Ints, list[Move]]:
    """Give the cache `capacity` slots, none of them on loan; nothing may be moving.

    `place[s]` is the tier's slot that the cache's slot s stands for. Victims go by the policy; a
    resident moves only where the tier no longer has its slot. Returns the new `place`, and the
    moves, none of which overwrites another's source.
    """
    before = {piece: int(place[cache.state.slot_of[piece]]) for piece in cache.residents().tolist()}
    cache.resize(capacity)
    state = cache.state
    fresh = np.full(capacity, -1, np.int64)
    homeless: list[int] = []
    for piece in cache.residents().tolist():
        slot = before[piece]
        if slot < capacity:
            fresh[state.slot_of[piece]] = slot
        else:
            homeless.append(piece)
    taken = set(fresh.tolist())
    free = [slot for slot in range(capacity) if slot not in taken][::-1]
    moves = []
    for piece in homeless:
        target = free.pop()
        fresh[state.slot_of[piece]] = target
        moves.append(Move(piece, before[piece], target))
    for slot in np.flatnonzero(fresh < 0).tolist():
        fresh[slot] = free.pop()
    return fresh, moves
