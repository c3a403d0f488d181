"""What a tier is: memory that experts are computed from, in one or several pools of equal slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from greenroom.core.layout import Copy, TensorSpec
from greenroom.errors import DeviceError


class Slots(Protocol):
    """What a kernel needs to address a slot: of `stride` bytes; in host memory they follow one
    another."""

    stride: int

    def address(self, slot: int) -> int:
        """Where a slot begins."""

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """A tensor of the expert in a slot, as a view."""


class SlotPool(Slots):
    """A tier of one memory; its `capacity` is how many slots there are."""

    capacity: int
    # Is told of the slots of each group, where the device computes it later.
    mark_computed: Callable[[Sequence[int]], None] | None = None

    @property
    def pools(self) -> Sequence[SlotPool]:
        return (self,)

    def at(self, slot: int) -> tuple[SlotPool, int]:
        """The pool of a slot of the tier, and its number there."""
        return self, slot

    def bytes(self, slot: int) -> Any:
        """A slot's bytes, [stride] uint8: of NumPy in host memory, of torch on a device."""

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Put what `data` (bytes from `start` on of an extent) holds of `copies` into a slot."""

    def clear(self, slot: int) -> None:
        """A new piece is about to come into this slot."""

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another."""

    def fill(self, slot: int, copy: np.ndarray, layer: int) -> None:
        """Put what a low-precision copy has of its expert to its places in the expert's slot."""
        raise AssertionError("experts here contain no copy")

    def trim(self, capacity: int) -> None:
        """Have this many slots; memory of those above goes back to the system."""

    def fitting_capacity(self, capacity: int) -> int:
        """The most slots that take the memory of no more than `capacity`."""
        return capacity

    def close(self) -> None:
        """Give the memory back now."""


def overlap(copy: Copy, start: int, nbytes: int) -> tuple[slice, slice] | None:
    """Of a contiguous copy, what bytes `start .. start + nbytes` of the extent have: where it lies
    in these bytes, and in the slot."""
    begin, end = max(copy.source, start), min(copy.source + copy.nbytes, start + nbytes)
    if begin >= end:
        return None
    shift = copy.target - copy.source
    return slice(begin - start, end - start), slice(begin + shift, end + shift)


def group_by_pool(slots: Sequence[int], pools: int) -> dict[int, list[int]]:
    """Which of these slots each of so many pools has, as places in the list."""
    found: dict[int, list[int]] = {}
    for i, slot in enumerate(slots):
        found.setdefault(slot % pools, []).append(i)
    return found


class MultiPoolTier:
    """Several pools as one tier, of different sizes or on different devices: where there are n,
    slot s is number s // n of pool s % n.

    `sizes(capacity)` says how many slots each of them has in the room of so many experts.
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
        """Have room for this many experts; where a pool has no room, all are as they were."""
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
