"""The host tier: slots in host memory that cache experts between disk and device.

In a chain of links (disk to host to device), an expert that is in host memory needs the last link
only. The host tier has its own slots and eviction policy. Its requests are the device's misses and
prefetches, so experts that stay on the device for long become old in host memory and are evicted
from it. Nothing is ever written back: an expert that leaves the device is still in host memory, or
is read from disk again.

The bottom segments of split experts, and low-precision copies, have a second cache in host memory,
with as many slots as the first and the same policy. A bottom segment is requested more often than
its top segment, which may be resident on the device, so one rank for both would be wrong.

Experts of a prompt are inserted into free slots only, so that those that decoding has left in host
memory stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import group_sizes
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.errors import BudgetError, UsageError


class HostCache:
    """One of the host tier's caches: of experts and top segments, or of their secondary pieces.

    first_piece: the id of the piece that belongs to expert 0
    first_slot:  the number in the tier of the cache's first slot
    pinned:      how many pinned slots each slot group has
    """

    __slots__ = ("cache", "first_piece", "first_slot", "pinned")

    def __init__(self, cache: Cache, first_piece: int, first_slot: int) -> None:
        self.cache, self.first_piece, self.first_slot = cache, first_piece, first_slot
        self.pinned = Counter[int]()


class HostTier:
    """A cache of experts in host memory, between disk and device.

    Experts in its slots are complete or on their way from disk. An expert that is on its way to the
    device has a pinned slot, from `request` to `release`. An expert without a slot passes through
    staging slots, and is not cached. Each of several devices has its own part of the slots, one
    after another. If experts are split, layers share slots where their segments have one size;
    otherwise each layer has its own. The slots of secondary pieces follow those of experts.
    """

    def __init__(self, pieces: Pieces, capacity: int, policy: Policy, *, seed: int = 0) -> None:
        """Build an empty cache of experts in host memory.

        capacity: its slots, counted in experts with their bottom segments or low-precision copies;
                  at least `least_host_slots`: with fewer there is no host tier

        UsageError for nested copies. BudgetError if segments of different sizes leave a layer no
        slot.
        """
        if pieces.copies is not None and pieces.copies.remainder:
            raise UsageError(
                "nested copies (--nested, or a pack of int8 experts with --miss-precision) and"
                " --host-memory (or --host-capacity) exclude each other: use separate copies, or no"
                " host tier"
            )
        if capacity < (least := least_host_slots(pieces)):
            raise BudgetError(
                f"host memory has room for {capacity} experts, but needs room for {least}: one for"
                " each device, or for each layer where --split has different shares; give"
                " a larger --host-memory (or --host-capacity)"
            )
        self.pieces, scope = pieces, _scope(pieces)
        self.cache = Cache(_kind(pieces, 0), capacity, policy, scope, seed)
        self.caches = [HostCache(self.cache, 0, 0)]
        if pieces.split is not None or pieces.copies is not None:
            second = Cache(_kind(pieces, 1), capacity, policy, scope, seed)
            self.caches.append(HostCache(second, pieces.experts, self.cache.capacity))
        self.requests = self.hits = 0
        self._experts = pieces.experts
        self._under_way: set[int] = set()  # pieces whose slots are pinned
        self._clock, self._request, self._prefill = 0, 0, False

    @property
    def capacity(self) -> int:
        """The number of experts that host memory has slots for, with their secondary pieces."""
        return self.cache.capacity

    @property
    def holds_all(self) -> bool:
        """Tell whether host memory has enough slots for all experts at the same time."""
        return self.capacity >= self._experts

    def routed(self, event: Routed) -> None:
        """Set the logical time of host-memory requests to the current layer and pass."""
        self._clock = event.step * self.pieces.layers + event.layer
        self._request, self._prefill = event.request, event.prefill

    def request(self, piece: int) -> tuple[int, bool]:
        """Request an expert, segment or copy in host memory, for its transfer to the device.

        Returns (its slot, whether its bytes are in the slot). The slot is -1 if the piece is not
        cached: all slots are pinned, or none is free for a prompt.
        """
        self.requests += 1
        of = self.caches[piece >= self._experts]
        cache, expert = of.cache, piece - of.first_piece
        state = cache.state
        resident, slot_group = bool(state.slot_of[expert] >= 0), int(state.group_of[expert])
        if not resident and of.pinned[slot_group] >= cache.sizes[slot_group]:  # all are pinned
            return -1, False
        experts = np.array([expert], np.int64)
        served = cache.serve(
            experts,
            self._clock,
            request=self._request,
            prefill=self._prefill,
            fill=1 if self._prefill else -1,
        )
        slot = int(served.slots[0])
        if slot < 0:  # not inserted by the policy, or in a prompt
            cache.release(experts)
            return -1, False
        self._under_way.add(piece)
        of.pinned[slot_group] += 1
        self.hits += resident
        return of.first_slot + slot, resident

    def has(self, piece: int) -> bool:
        """Tell whether an expert, segment or copy has a slot in host memory."""
        of = self.caches[piece >= self._experts]
        return bool(of.cache.state.slot_of[piece - of.first_piece] >= 0)

    def release(self, piece: int, complete: bool) -> None:
        """Unpin an expert in host memory once its transfer to the device has ended.

        Unless its bytes are `complete`, the expert is removed from host memory.
        """
        of = self.caches[piece >= self._experts]
        expert = piece - of.first_piece
        self._under_way.remove(piece)
        of.pinned[int(of.cache.state.group_of[expert])] -= 1
        of.cache.release(np.array([expert], np.int64))
        if not complete:
            of.cache.remove(expert, self._clock)


def host_slot_groups(pieces: Pieces, capacity: int) -> list[tuple[int, Ints]]:
    """List the groups of equal slots in a host tier: (number of slots, pieces that fit).

    The groups are in the order of their slots. `capacity` is that of the host tier.
    """
    groups, scope = [], _scope(pieces)
    for number in range(1 if pieces.split is None and pieces.copies is None else 2):
        kind, first = _kind(pieces, number), number * pieces.experts
        group_of = kind.home_device if scope == "shared" else kind.layer
        for group, size in enumerate(group_sizes(kind, capacity, scope)):
            groups.append((size, first + np.flatnonzero(group_of == group)))
    return groups


def least_host_slots(pieces: Pieces) -> int:
    """Return the smallest capacity of a host tier, counted in experts."""
    return pieces.layers if _scope(pieces) == "per-layer" else len(pieces.active_devices)


def _scope(pieces: Pieces) -> Scope:
    """Decide whether layers share slots of host memory: not if their segments differ in size."""
    split = pieces.split
    if split is None:
        return "shared"
    alike = len({*split.tops}) == len({*split.bottoms}) == 1
    return "shared" if alike else "per-layer"


def _kind(pieces: Pieces, number: int) -> Pieces:
    """Return the pieces of one kind, by expert: 0 for experts or top segments, 1 for secondary."""
    first, end = number * pieces.experts, (number + 1) * pieces.experts
    # A copy of the home devices: slots of host memory stay where they are when these change.
    return replace(
        pieces, layer=pieces.layer[first:end], nbytes=pieces.nbytes[first:end],
        chunks=pieces.chunks[first:end], home_device=pieces.home_device[first:end].copy(),
        split=None, copies=None,
    )  # fmt: skip
