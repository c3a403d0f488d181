"""Other sizes for the cache: which piece moves to which slot.

The tier's slots are of as many kinds as there are devices, or sizes of slots: slot s is number
s // kinds of kind s % kinds. A piece never leaves its kind.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.events import Move
from greenroom.core.pieces import Ints


def kinds_of(cache: Cache) -> int:
    """Kinds of the tier's slots. Where experts are split each group's are of a size of its own, and
    the last kind are those of bottoms; so are those of low-precision copies, beside one more."""
    pieces = cache.pieces
    if pieces.split is not None:
        return len(cache.sizes) + 1
    return pieces.devices if pieces.copies is None else 2


def reshape(cache: Cache, place: Ints, capacity: int) -> tuple[Ints, list[Move]]:
    """Give the cache `capacity` slots, none of them on loan; nothing may be moving.

    `place[s]` is the tier's slot that the cache's slot s stands for, of the same kind. Victims
    go by the policy; a resident moves only where the tier no longer has its slot. Returns the new
    `place`, and the moves, none of which overwrites another's source.
    """
    before = {piece: int(place[cache.state.slot_of[piece]]) for piece in cache.residents().tolist()}
    cache.resize(capacity)
    state = cache.state
    there, kinds = initial_tier_slots(cache), kinds_of(cache)
    fresh = np.full(there.size, -1, np.int64)
    homeless, known = [], set(there.tolist())
    for piece in cache.residents().tolist():
        if before[piece] in known:
            fresh[state.slot_of[piece]] = before[piece]
        else:
            homeless.append(piece)
    taken = set(fresh.tolist())
    free: list[list[int]] = [[] for _ in range(kinds)]
    for slot in there[::-1].tolist():
        if slot not in taken:
            free[slot % kinds].append(slot)
    moves = []
    for piece in homeless:
        target = free[before[piece] % kinds].pop()
        fresh[state.slot_of[piece]] = target
        moves.append(Move(piece, before[piece], target))
    for slot in np.flatnonzero(fresh < 0).tolist():
        fresh[slot] = free[int(there[slot]) % kinds].pop()
    return fresh, moves


def initial_tier_slots(cache: Cache) -> Ints:
    """The tier's slot for each of the cache's, [slots], before anything has moved."""
    kinds, pieces = kinds_of(cache), cache.pieces
    if pieces.split is None:
        counts = pieces.slots_per_device(cache.capacity)
    else:
        counts = [b - a for a, b in pairwise(cache.state.first.tolist())]
    each = [np.arange(n) * kinds + kind for kind, n in enumerate(counts)]
    return np.concatenate(each).astype(np.int64)
