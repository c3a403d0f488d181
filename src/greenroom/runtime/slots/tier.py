"""Memory tiers that experts are computed from: pools of equal slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from greenroom.core.layout import Copy, TensorSpec
from greenroom.errors import DeviceError


class Slots(Protocol):
    """Protocol of slots for experts, as kernels see them: addresses and tensors.

    A slot has `stride` bytes; in host memory slots are consecutive.
    """

    stride: int

    def address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """Return a view of one tensor of the expert in a slot."""


class SlotPool(Slots):
    """A pool of `capacity` equal slots in one memory; alone it is a tier."""

    capacity: int
    # Called with the slots of each group on devices that compute it asynchronously.
    mark_computed: Callable[[Sequence[int]], None] | None = None

    @property
    def pools(self) -> Sequence[SlotPool]:
        return (self,)

    def at(self, slot: int) -> tuple[SlotPool, int]:
        """Return the pool that holds a tier's slot, and the slot's number there."""
        return self, slot

    def bytes(self, slot: int) -> Any:
        """Return a slot's bytes: [stride] uint8.

        A NumPy array in host memory, a tensor on a device.
        """

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Write a chunk of an expert into a slot.

        `data` are the bytes of an extent from `start` on.

        `copies` say where an extent's bytes go in the slot.
        """

    def clear(self, slot: int) -> None:
        """Prepare a slot, before another expert is written into it."""

    def move(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another slot."""

    def fill(self, slot: int, copy: np.ndarray, layer: int) -> None:
        """Copy the bytes shared by a low-precision copy and its expert to the expert's slot."""
        raise AssertionError("experts here contain no copy")

    def trim(self, capacity: int) -> None:
        """Set the number of slots; the memory of dropped slots is freed."""

    def fitting_capacity(self, capacity: int) -> int:
        """Return the largest number of slots that needs no more memory than `capacity` slots."""
        return capacity

    def close(self) -> None:
        """Free the memory of all slots now."""


def overlap(copy: Copy, start: int, nbytes: int) -> tuple[slice, slice] | None:
    """Return the part of a contiguous copy that lies in a range of an extent.

    The range is bytes `start .. start + nbytes`.

    Returns its ranges within these bytes and within the slot; None if there is no overlap.
    """
    begin, end = max(copy.source, start), min(copy.source + copy.nbytes, start + nbytes)
    if begin >= end:
        return None
    shift = copy.target - copy.source
    return slice(begin - start, end - start), slice(begin + shift, end + shift)


def group_by_pool(slots: Sequence[int], pools: int) -> dict[int, list[int]]:
    """Group indices into `slots` by the pool that each slot belongs to."""
    indices: dict[int, list[int]] = {}
    for i, slot in enumerate(slots):
        indices.setdefault(slot % pools, []).append(i)
    return indices


class MultiPoolTier:
    """A memory tier of several slot pools, of different sizes or on different devices.

    With n pools, slot s is number s // n of pool s % n. `sizes(capacity)` is the number of slots in
    each pool of a cache with room for `capacity` experts.
    """

    def __init__(
        self, pools: Sequence[SlotPool], capacity: int, sizes: Callable[[int], list[int]]
    ) -> None:
        self.pools, self.capacity, self._sizes = tuple(pools), capacity, sizes

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
        """Resize all slot pools to hold `capacity` experts, or none if one fails."""
        before = [pool.capacity for pool in self.pools]
        try:
            for pool, size in zip(self.pools, self._sizes(capacity), strict=True):
                if size != pool.capacity:
                    pool.trim(size)
        except DeviceError:
            for pool, had in zip(self.pools, before, strict=True):
                if pool.capacity > had:
                    pool.trim(had)
            raise
        self.capacity = capacity

    def fitting_capacity(self, capacity: int) -> int:
        most = [
            p.fitting_capacity(n) for p, n in zip(self.pools, self._sizes(capacity), strict=True)
        ]
        while any(n > m for n, m in zip(self._sizes(capacity), most, strict=True)):
            capacity -= 1
        return capacity

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


Tier: TypeAlias = SlotPool | MultiPoolTier
