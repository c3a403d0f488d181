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
from collections.abc import Sequence
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

    Pieces have their numbers within the cache, from 0.

    pinned: how many pinned slots each slot group has
    """

    def __init__(
        self, pieces: Pieces, capacity: int, policy: Policy, scope: Scope, seed: int
    ) -> None:
        self.cache = Cache(pieces, capacity, policy, scope, seed)
        self.pinned = Counter[int]()

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    def slots(self) -> dict[int, int]:
        """Return the slot of each piece that has one, by ascending piece."""
        pieces = self.cache.residents()
        return dict(zip(pieces.tolist(), self.cache.state.slot_of[pieces].tolist(), strict=True))

    @property
    def slot_of(self) -> Ints:
        """The slot of each piece, or -1."""
        return self.cache.state.slot_of

    def has(self, piece: int) -> bool:
        """Tell whether a piece has a slot."""
        return bool(self.slot_of[piece] >= 0)

    def use(self, pieces: Ints, clock: int, request: int) -> None:
        """Report requests of pieces that are complete, and in use for no time."""
        for piece in pieces.tolist():
            self.request(piece, clock, request, False)
            self.release(piece, True, clock)

    def request(self, piece: int, clock: int, request: int, prefill: bool) -> tuple[int, bool]:
        """Request a piece; return its slot, pinned, and whether it had the slot before.

        The slot is -1 if all slots are pinned, none is free for a prompt, or the policy inserts
        nothing.
        """
        cache, state = self.cache, self.cache.state
        resident, slot_group = self.has(piece), int(state.group_of[piece])
        if not resident and self.pinned[slot_group] >= cache.sizes[slot_group]:  # all are pinned
            return -1, False
        pieces, fill = np.array([piece], np.int64), 1 if prefill else -1
        served = cache.serve(pieces, clock, request=request, prefill=prefill, fill=fill)
        slot = int(served.slots[0])
        if slot < 0:
            cache.release(pieces)
            return -1, False
        self.pinned[slot_group] += 1
        return slot, resident

    def release(self, piece: int, complete: bool, clock: int) -> None:
        """Unpin a piece; remove it unless its bytes are complete."""
        self.pinned[int(self.cache.state.group_of[piece])] -= 1
        self.cache.release(np.array([piece], np.int64))
        if not complete:
            self.cache.remove(piece, clock)


class CompleteHostCache:
    """A host cache with a slot for every piece, which needs no policy: it never evicts.

    A policy takes longer than all else that is done for a request.
    """

    def __init__(self, sizes: Sequence[int], group_of: Ints) -> None:
        """Give each piece a slot; slot groups have `sizes`, `group_of` has each piece's group."""
        order, first = np.argsort(group_of, kind="stable"), np.cumsum([0, *sizes])
        counts = np.bincount(group_of, minlength=len(sizes))
        places = np.concatenate([np.arange(n) + at for n, at in zip(counts, first, strict=False)])
        slots = np.empty(group_of.size, np.int64)
        slots[order] = places
        self.capacity, self._slots = sum(sizes), slots.tolist()
        self.slot_of: Ints = np.full(group_of.size, -1)  # of pieces that were requested
        self._each_slot = memoryview(self.slot_of)  # type: ignore[arg-type]

    @staticmethod
    def of(pieces: Pieces, capacity: int, scope: Scope) -> CompleteHostCache | None:
        """Return a cache of so many slots; None unless each slot group has room for its pieces."""
        sizes = group_sizes(pieces, capacity, scope)
        group_of = _group_of(pieces, scope)
        if (np.bincount(group_of, minlength=len(sizes)) > sizes).any():
            return None
        return CompleteHostCache(sizes, group_of)

    def slots(self) -> dict[int, int]:
        """Return the slot of each piece that was requested, by ascending piece."""
        return {n: slot for n, slot in enumerate(self.slot_of.tolist()) if slot >= 0}

    def has(self, piece: int) -> bool:
        """Tell whether a piece is in its slot, or on its way there."""
        return self._each_slot[piece] >= 0

    def request(self, piece: int, clock: int, request: int, prefill: bool) -> tuple[int, bool]:
        """Request a piece; return its slot, and whether it was requested before."""
        slot, present = self._slots[piece], self._each_slot[piece] >= 0
        self._each_slot[piece] = slot
        return slot, present

    def release(self, piece: int, complete: bool, clock: int) -> None:
        """Record the end of a piece's transfer; remove it unless its bytes are complete."""
        self._each_slot[piece] = self._slots[piece] if complete else -1

    def use(self, pieces: Ints, clock: int, request: int) -> None:
        """Report requests of pieces that are complete: no policy counts them."""


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
        self.pieces = pieces
        kinds = 1 if pieces.split is None and pieces.copies is None else 2
        self.caches = [_host_cache(pieces, kind, capacity, policy, seed) for kind in range(kinds)]
        self._has_policy = any(isinstance(each, HostCache) for each in self.caches)
        self.requests = self.hits = 0
        self.leases: set[int] = set()  # pieces whose slots are in use
        self._experts = pieces.experts
        self._clock, self._request, self._prefill = 0, 0, False

    @property
    def capacity(self) -> int:
        """The number of experts that host memory has slots for, with their secondary pieces."""
        return self.caches[0].capacity

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
        cached: all slots are in use, or none is free for a prompt.
        """
        self.requests += 1
        second = piece >= self._experts
        slot, resident = self.caches[second].request(
            piece - second * self._experts, self._clock, self._request, self._prefill
        )
        if slot < 0:
            return -1, False
        self.leases.add(piece)
        self.hits += resident
        return slot + second * self.capacity, resident

    @property
    def slot_of(self) -> Ints:
        """The slot of each expert in host memory, or -1; complete if no transfer is under way."""
        return self.caches[0].slot_of

    def use(self, experts: Ints, event: Routed) -> None:
        """Count requests of experts in host memory, which a step loads at once."""
        self.requests += experts.size
        self.hits += experts.size
        if self._has_policy:
            self.routed(event)
            self.caches[0].use(experts, self._clock, self._request)

    def has(self, piece: int) -> bool:
        """Tell whether an expert, segment or copy has a slot in host memory."""
        return self.caches[piece >= self._experts].has(piece % self._experts)

    def release(self, piece: int, complete: bool) -> None:
        """Unpin an expert in host memory once its transfer to the device has ended.

        Unless its bytes are `complete`, the expert is removed from host memory.
        """
        self.leases.remove(piece)
        of = self.caches[piece >= self._experts]
        of.release(piece % self._experts, complete, self._clock)


def _host_cache(
    pieces: Pieces, number: int, capacity: int, policy: Policy, seed: int
) -> HostCache | CompleteHostCache:
    """Make a cache of pieces of one kind; without a policy if it has room for all of them."""
    kind, scope = _kind(pieces, number), _scope(pieces)
    policy.check_online()
    complete = CompleteHostCache.of(kind, capacity, scope) if policy.preload is None else None
    return complete or HostCache(kind, capacity, policy, scope, seed)


def host_slot_groups(pieces: Pieces, capacity: int) -> list[tuple[int, Ints]]:
    """List the groups of equal slots in a host tier: (number of slots, pieces that fit).

    The groups are in the order of their slots. `capacity` is that of the host tier.
    """
    groups, scope = [], _scope(pieces)
    for number in range(1 if pieces.split is None and pieces.copies is None else 2):
        kind, first = _kind(pieces, number), number * pieces.experts
        group_of = _group_of(kind, scope)
        for group, size in enumerate(group_sizes(kind, capacity, scope)):
            groups.append((size, first + np.flatnonzero(group_of == group)))
    return groups


def least_host_slots(pieces: Pieces) -> int:
    """Return the smallest capacity of a host tier, counted in experts."""
    if _scope(pieces) == "shared":
        return len(pieces.active_devices)
    # Each device has slots in proportion to its experts.
    return -(-pieces.layers * pieces.experts // min(filter(None, pieces.experts_per_device)))


def _scope(pieces: Pieces) -> Scope:
    """Decide whether layers share slots of host memory: not if their segments differ in size."""
    split = pieces.split
    if split is None:
        return "shared"
    alike = len({*split.tops}) == len({*split.bottoms}) == 1
    return "shared" if alike else "per-layer"


def _group_of(pieces: Pieces, scope: Scope) -> Ints:
    """Return the slot group of each piece: its device, or its layer on its device."""
    if scope == "shared":
        return pieces.home_device
    return pieces.home_device * pieces.layers + pieces.layer


def _kind(pieces: Pieces, number: int) -> Pieces:
    """Return the pieces of one kind, by expert: 0 for experts or top segments, 1 for secondary."""
    first, end = number * pieces.experts, (number + 1) * pieces.experts
    # A copy of the home devices: slots of host memory stay where they are when these change.
    return replace(
        pieces, layer=pieces.layer[first:end], nbytes=pieces.nbytes[first:end],
        chunks=pieces.chunks[first:end], home_device=pieces.home_device[first:end].copy(),
        split=None, copies=None,
    )  # fmt: skip
