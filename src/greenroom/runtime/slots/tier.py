"""Memory that experts are computed from: pools of equal slots on the host or on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from greenroom.core.cache.scope import Scope
from greenroom.core.layout import Copy, TensorSpec
from greenroom.errors import DeviceError

ABSENT = -(1 << 62)  # in place of a slot's offset from slot 0, which may be negative

Sizes: TypeAlias = Callable[[int], list[int]]  # capacity -> slots of each pool


class Slots(Protocol):
    """Protocol of memory slots for experts, as kernels see them: addresses and tensors.

    A slot has `stride` bytes. In host memory slots are consecutive.
    """

    stride: int

    def address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """Return a view of one tensor of the expert in a slot."""


class SlotPool(Slots):
    """A pool of `capacity` equal slots for experts in one memory.

    A `Tier` is a single pool or a `MultiPoolTier`.
    """

    capacity: int
    # On a device that computes asynchronously: called with the slots of each launched expert group.
    mark_computed: Callable[[Sequence[int]], None] | None = None

    @property
    def pools(self) -> Sequence[SlotPool]:
        return (self,)

    def at(self, slot: int) -> tuple[SlotPool, int]:
        """Return the pool that contains a slot, and the slot's number in the pool."""
        return self, slot

    def bytes(self, slot: int) -> Any:
        """Return a slot's bytes: [stride] uint8.

        Returns a NumPy array for host memory, and a tensor for a device.
        """

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Write a chunk of an expert into a slot.

        An expert is stored in extents, byte ranges of files. `data` are an extent's bytes from
        `start` on; `copies` define where the bytes of the extent go in the slot.
        """

    def clear(self, slot: int) -> None:
        """Forget which bytes arrived in a slot, before another expert is written there."""

    def move(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another slot."""

    def fill(self, slot: int, copy: Any, layer: int) -> None:
        """Write the bytes that an expert shares with its low-precision copy to the expert's slot.

        Nested experts are stored as two 4-bit planes, one of which is the copy. `copy` has the
        bytes of the copy's slot, as `bytes` returns them.
        """

    def trim(self, capacity: int) -> None:
        """Set the number of slots, and free the memory of dropped slots.

        Raises DeviceError if the memory has no room for added slots.
        """

    def grow(
        self, capacity: int, scope: Scope | None = None, sizes: Sequence[int] | None = None
    ) -> None:
        """Add slots before the cache is resized to a capacity; `trim` follows the resize.

        scope: how layers divide the slots, which is another number of slots in pools of layers
        sizes: the number of slots of each pool, if the devices change
        """
        if capacity > self.capacity:
            self.trim(capacity)

    def held_bytes(self, capacity: int) -> int:
        """Return the bytes of memory that the pool has after a resize."""
        return capacity * self.stride

    def fitting_capacity(self, capacity: int, least: int, most: int) -> int:
        """Return a number of slots that takes at most the memory of `capacity` slots.

        It is the largest from `least` to `most`. It may be below `capacity`, if a pool frees memory
        only in larger units than a slot.
        """
        return fitting_capacity(self.pools, lambda slots: [slots], capacity, least, most)

    def close(self) -> None:
        """Free the memory of all slots now."""


def overlap(copy: Copy, start: int, nbytes: int) -> tuple[slice, slice] | None:
    """Return which bytes of a range are copied to which bytes of a slot.

    The range has `nbytes` bytes from byte `start` on of an extent (a contiguous byte range of a
    file); the copy must be contiguous. Returns two slices: of the range, and of the slot. Returns
    None if the copy takes none of the range's bytes.
    """
    begin, end = max(copy.source, start), min(copy.source + copy.nbytes, start + nbytes)
    if begin >= end:
        return None
    shift = copy.target - copy.source
    return slice(begin - start, end - start), slice(begin + shift, end + shift)


def group_by_pool(slots: Sequence[int], pools: int) -> dict[int, list[int]]:
    """Group the indices of `slots` by the pool of each slot: slot s is in pool s % pools."""
    indices: dict[int, list[int]] = {}
    for i, slot in enumerate(slots):
        indices.setdefault(slot % pools, []).append(i)
    return indices


def fitting_capacity(
    pools: Sequence[SlotPool], sizes: Sizes, capacity: int, least: int, most: int, devices: int = 1
) -> int:
    """Return the largest capacity from `least` to `most` that takes the memory of `capacity`.

    Pool p is on device p % devices. Each device must have enough memory: one of its pools may take
    more than its share if others take less. What a pool never frees counts as its share. If no
    capacity fits, the result is `least`.

    sizes: the number of slots of each pool for a capacity
    """

    def on_each_device(nbytes: Iterable[int]) -> list[int]:
        of_pools = list(nbytes)
        return [sum(of_pools[device::devices]) for device in range(devices)]

    limits = on_each_device(
        max(n * pool.stride, pool.held_bytes(1))
        for pool, n in zip(pools, sizes(capacity), strict=True)
    )
    for fitting in range(most, least, -1):
        totals = on_each_device(
            pool.held_bytes(n) for pool, n in zip(pools, sizes(fitting), strict=True)
        )
        if all(total <= limit for total, limit in zip(totals, limits, strict=True)):
            return fitting
    return least


class MultiPoolTier:
    """Memory for experts that consists of several slot pools, for example one a device.

    Pools may have slots of different sizes. With n pools, slot s of the tier is slot s // n of pool
    s % n. Pool p is on device p % devices. `sizes(capacity)` returns the number of slots of each
    pool of a cache for `capacity` experts; `sizes_for(scope)` is such a function for another
    division of slots among layers.
    """

    def __init__(
        self,
        pools: Sequence[SlotPool],
        capacity: int,
        sizes: Sizes,
        sizes_for: Callable[[Scope], Sizes] | None = None,
        devices: int = 1,
    ) -> None:
        self.pools, self.capacity, self._sizes = tuple(pools), capacity, sizes
        self._sizes_for, self._devices = sizes_for, devices

    def at(self, slot: int) -> tuple[SlotPool, int]:
        count = len(self.pools)
        return self.pools[slot % count], slot // count

    @property
    def mark_computed(self) -> Callable[[Sequence[int]], None] | None:
        return self._mark_computed if any(pool.mark_computed for pool in self.pools) else None

    def _mark_computed(self, slots: Sequence[int]) -> None:
        for number, places in group_by_pool(slots, len(self.pools)).items():
            mark = self.pools[number].mark_computed
            if mark is not None:
                mark([slots[i] // len(self.pools) for i in places])

    def trim(self, capacity: int) -> None:
        """Resize all slot pools for a cache of `capacity` experts.

        Raises DeviceError if a device has no room; then pools that have grown shrink again.
        """
        self._trim_pools(self._sizes(capacity))
        self.capacity = capacity

    def _trim_pools(self, sizes: Sequence[int]) -> None:
        before = [pool.capacity for pool in self.pools]
        try:
            for pool, size in zip(self.pools, sizes, strict=True):
                if size != pool.capacity:
                    pool.trim(size)
        except DeviceError:
            for pool, had in zip(self.pools, before, strict=True):
                if pool.capacity > had:
                    pool.trim(had)
            raise

    def grow(
        self, capacity: int, scope: Scope | None = None, sizes: Sequence[int] | None = None
    ) -> None:
        """Add slots before the cache is resized, divided by another scope or moved to `sizes`.

        Pools that will have fewer slots keep them until `trim`, which follows the resize. Raises
        DeviceError if a device has no room; then pools that have grown shrink again.
        """
        sizes_of = self._sizes
        if sizes is None:
            if scope is not None and self._sizes_for is not None:
                sizes_of = self._sizes_for(scope)
            sizes = sizes_of(capacity)
        # A pool may shrink while the capacity rises: shares of layers are rounded.
        self._trim_pools([max(n, p.capacity) for n, p in zip(sizes, self.pools, strict=True)])
        self._sizes = sizes_of

    def fitting_capacity(self, capacity: int, least: int, most: int) -> int:
        return fitting_capacity(self.pools, self._sizes, capacity, least, most, self._devices)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


Tier: TypeAlias = SlotPool | MultiPoolTier
