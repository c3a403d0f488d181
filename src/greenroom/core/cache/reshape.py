"""Resizing of the cache: which expert moves to which slot in memory.

The slots of a memory are of one or several kinds, since they are on several devices or of several
sizes. Memory slot s is number s // kinds of kind s % kinds. An expert, a segment or a copy never
moves to a slot of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import group_sizes, slot_groups
from greenroom.core.events import Move
from greenroom.core.pieces import Ints
from greenroom.errors import UsageError


def kinds_of(cache: Cache) -> int:
    """Count the kinds of slots in a memory, which differ in device or size: see `pool_sizes`."""
    pieces = cache.pieces
    if pieces.split is not None:
        return len(cache.sizes) + pieces.devices
    return pieces.devices * (1 if pieces.copies is None else 2)


def reshape(cache: Cache, tier_slots: Ints, capacity: int) -> tuple[Ints, list[Move]]:
    """Resize the expert cache; returns the new memory slots of the cache slots, and the moves.

    tier_slots: for each cache slot, the number of its slot in memory

    The policy chooses victims. A resident moves only if its memory slot is beyond the new capacity.
    No move overwrites the source of another. No slot may be borrowed, and no transfer may be under
    way.
    """
    before = {
        piece: int(tier_slots[cache.state.slot_of[piece]]) for piece in cache.residents().tolist()
    }
    cache.resize(capacity)
    state = cache.state
    initial, kinds = initial_tier_slots(cache), kinds_of(cache)
    fresh = np.full(initial.size, -1, np.int64)
    displaced, existing = [], set(initial.tolist())
    for piece in cache.residents().tolist():
        if before[piece] in existing:
            fresh[state.slot_of[piece]] = before[piece]
        else:
            displaced.append(piece)
    used = set(fresh.tolist())
    free: list[list[int]] = [[] for _ in range(kinds)]
    for slot in initial[::-1].tolist():
        if slot not in used:
            free[slot % kinds].append(slot)
    moves = []
    for piece in displaced:
        target = free[before[piece] % kinds].pop()
        fresh[state.slot_of[piece]] = target
        moves.append(Move(piece, before[piece], target))
    for slot in np.flatnonzero(fresh < 0).tolist():
        fresh[slot] = free[int(initial[slot]) % kinds].pop()
    return fresh, moves


def check_new_scope(
    cache: Cache, capacity: int, scope: Scope, pinned_set: Ints | None = None
) -> None:
    """Check that the slots of a cache can be divided among layers in another way.

    `pinned_set` are the experts that are never evicted; None is the present set. Only layers with
    slots of their own can get other numbers: UsageError otherwise, BudgetError if the capacity or
    the pinned experts do not allow the division.
    """
    if "shared" in (cache.scope, scope):
        raise UsageError(
            "a cache whose layers share all slots cannot be divided among them later, nor the other"
            " way round: choose --scope when the model is loaded"
        )
    sizes = group_sizes(cache.pieces, capacity, scope)
    cache.check_pinned(sizes, cache.pinned_set if pinned_set is None else pinned_set)


def check_new_devices(
    cache: Cache, capacity: int, devices: Sequence[int], pinned_set: Ints | None = None
) -> Ints:
    """Return every piece's home device if only `devices` have experts.

    `pinned_set` are the experts that are never evicted; None is the present set. UsageError for
    devices that the memory does not have. BudgetError if one would have no slot, or only slots of
    pinned experts.
    """
    if not set(devices) <= set(range(cache.pieces.devices)):
        raise UsageError(
            f"devices {', '.join(map(str, devices))}: the cache was made for {cache.pieces.devices}"
        )
    pieces = cache.pieces.on_devices(devices)
    sizes = group_sizes(pieces, capacity, cache.scope)
    pinned_set = cache.pinned_set if pinned_set is None else pinned_set
    cache.check_pinned(sizes, pinned_set, slot_groups(pieces, sizes))
    return pieces.home_device


def evict_moving(cache: Cache, home_device: Ints) -> None:
    """Evict the residents whose home device changes to another one of `home_device`."""
    for piece in cache.residents().tolist():
        if home_device[piece] != cache.pieces.home_device[piece]:
            cache.remove(piece, cache.now[0])


def initial_tier_slots(cache: Cache) -> Ints:
    """Return the first memory slot of each cache slot, before any slots were exchanged.

    The result is an array [cache slots].
    """
    kinds, devices = kinds_of(cache), cache.pieces.devices
    sizes = np.reshape(cache.sizes, (devices, -1))
    if cache.pieces.split is None:
        sizes = sizes.sum(axis=1, keepdims=True)
    each = [
        np.arange(n) * kinds + group * devices + device
        for device, groups in enumerate(sizes.tolist())
        for group, n in enumerate(groups)
    ]
    return np.concatenate(each).astype(np.int64)
