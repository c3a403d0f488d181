"""The arrays of the expert cache: slot groups, and the experts in the slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from greenroom.core.cache.scope import (
    Scope,
    check_scope,
    exact_slots,
    split_capacity,
    top_slots,
)
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import CacheState


def group_sizes(pieces: Pieces, capacity: int, scope: Scope) -> list[int]:
    """Return the number of slots of each of the cache's slot groups.

    Each device has its own slot groups; the groups are in the order of their devices. Those of a
    device without experts have no slots.

    `capacity` is the cache's memory, counted in unsplit experts. If experts are split, the memory
    that the slots for bottom segments leave is divided into slots for top segments. Slots for low-
    precision copies are subtracted from the capacity too.
    """
    if pieces.split is not None:
        return top_slots(pieces, pieces.split, capacity, scope)
    if pieces.copies is not None:
        capacity = exact_slots(pieces, pieces.copies, capacity)
    sizes: list[int] = []
    for device, share in enumerate(pieces.slots_per_device(capacity)):
        if not share and pieces.devices > 1:  # a spare device
            sizes += [0] * (1 if scope == "shared" else pieces.layers)
            continue
        counts = np.bincount(
            pieces.layer[pieces.home_device == device], minlength=pieces.layers
        ).tolist()
        sizes += _layer_sizes(share, counts, scope)
    return sizes


def _layer_sizes(capacity: int, experts: Sequence[int], scope: Scope) -> list[int]:
    """Divide a device's slots among its layers: those with `experts`. Others get none."""
    layers = [layer for layer, count in enumerate(experts) if count]
    if scope == "shared" or len(layers) == len(experts):
        return split_capacity(capacity, len(experts), scope, experts)
    check_scope(scope, len(experts))
    shares = scope if isinstance(scope, str) else tuple(scope[layer] for layer in layers)
    sizes = [0] * len(experts)
    counts = [experts[layer] for layer in layers]
    divided = split_capacity(capacity, len(layers), shares, counts)
    for layer, size in zip(layers, divided, strict=True):
        sizes[layer] = size
    return sizes


def pool_sizes(pieces: Pieces, capacity: int, scope: Scope) -> list[int]:
    """Return the number of slots of each pool in a memory.

    A pool has equal slots on one device. Of each kind of slots there is one pool on each device:
    pool n is of kind n // devices, on device n % devices. Top segments have one kind for each slot
    group of a device, other experts one. Bottom segments or low-precision copies are the last kind.
    """
    sizes = np.reshape(group_sizes(pieces, capacity, scope), (pieces.devices, -1))
    if pieces.split is None:
        sizes = sizes.sum(axis=1, keepdims=True)
    if pieces.split is not None or pieces.copies is not None:
        sizes = np.column_stack([sizes, pieces.secondary_slots])
    return [int(n) for n in sizes.T.ravel()]


def slot_groups(pieces: Pieces, sizes: Sequence[int]) -> Ints | None:
    """Return the slot group of each piece, of as many as `sizes`, on several devices.

    On one device the result is None, the default of `empty_state`.
    """
    if pieces.devices == 1:
        return None
    each = len(sizes) // pieces.devices
    return pieces.home_device * each + (pieces.layer if each > 1 else 0)


def empty_state(layer: Ints, sizes: Sequence[int], group_of: Ints | None = None) -> CacheState:
    """Build the state of an empty cache with slot groups of the given sizes.

    A piece is an unsplit expert, or a segment or copy of one.

    layer:    the layer of each piece, [pieces]
    group_of: the slot group of each piece, [pieces]; by default one group for all layers, or one
              for each layer
    """
    if group_of is None:
        group_of = np.zeros(layer.size, np.int64) if len(sizes) == 1 else layer.astype(np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(first[-1])
    # Stacks: the lowest slot of a group is on top.
    free = [slot for a, b in pairwise(first.tolist()) for slot in range(b - 1, a - 1, -1)]
    return CacheState(
        slot_of=np.full(layer.size, -1, np.int64),
        piece_in=np.full(total, -1, np.int64),
        pinned=np.zeros(layer.size, np.int64),
        group_of=group_of,
        free=np.array(free, np.int64),
        first=first,
        free_count=np.asarray(sizes, np.int64),
    )


def preload(state: CacheState, pieces: Ints) -> None:
    """Give each of some experts a cache slot, without reporting them to the eviction policy."""
    for piece in pieces.tolist():
        slot_group = state.group_of[piece]
        state.free_count[slot_group] -= 1
        slot = state.free[state.first[slot_group] + state.free_count[slot_group]]
        state.slot_of[piece], state.piece_in[slot] = slot, piece
