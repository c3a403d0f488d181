"""Slots of experts that are stored as two planes of four bits, the first of them an int4 copy.

A nested int8 expert has codes 16 h + l, where h is what the int4 copy says, in steps of 16 scales,
and l from -8 to 7 is what it lacks. Bytes arrive plane by plane, in any order: h goes to the first
half of the place of the codes, l to the second. When all of them are there the planes are joined in
place, by the thread that has brought the last: then the slot holds an int8 expert like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.layout import Copy, TensorSpec
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.tier import OnePool

STEP = 16  # what h counts in
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Planes:
    """Where one matrix lies in the slot of an exact expert: its codes and scales."""

    codes: int
    nbytes: int
    scale: int
    scales: int


@dataclass(frozen=True)
class Nesting:
    """How experts of a layer are joined.

    planes: of each matrix
    copied: what goes from a copy's slot to an expert's, where only the rest is fetched
    totals: bytes that are to come, by the copies that an extent is read with
    """

    planes: tuple[Planes, ...]
    copied: tuple[Copy, ...]
    totals: Mapping[tuple[Copy, ...], int]


class NestedSlots(OnePool):
    """Slots of exact experts; what arrives is joined when the last byte is there. Thread-safe for
    different slots, and for different chunks of one."""

    def __init__(self, slots: HostSlots, nestings: Sequence[Nesting]) -> None:
        """`slots` are the memory, `nestings` those of each layer."""
        self.slots, self._nestings = slots, tuple(nestings)
        self._by_copies = {c: (each, n) for each in nestings for c, n in each.totals.items()}
        self._left: dict[int, int] = {}  # slot -> bytes that are still to come
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """How many there are."""
        return self.slots.capacity

    @property
    def stride(self) -> int:
        return self.slots.stride

    def address(self, slot: int) -> int:
        return self.slots.address(slot)

    def bytes(self, slot: int) -> Bytes:
        return self.slots.bytes(slot)

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        return self.slots.tensor(slot, spec)

    def write(self, slot: int, copies: tuple[Copy, ...], data: Bytes, start: int) -> None:
        """As `HostSlots.write`; joins the planes with the last bytes."""
        nesting, total = self._by_copies[copies]
        self.slots.write(slot, copies, data, start)
        with self._lock:
            left = self._left[slot] = self._left.get(slot, total) - data.size
            if left == 0:
                del self._left[slot]
        if left == 0:
            join(self.slots.bytes(slot), nesting.planes)

    def fill(self, slot: int, copy: Bytes, layer: int) -> None:
        """Put a copy's planes to their places; the rest is yet to come."""
        self.slots.write(slot, self._nestings[layer].copied, copy, 0)

    def clear(self, slot: int) -> None:
        """A new piece is about to come into this slot."""
        with self._lock:
            self._left.pop(slot, None)
        self.slots.clear(slot)

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        self.slots.move(source, target)

    def trim(self, capacity: int) -> None:
        """As `HostSlots.trim`."""
        self.slots.trim(capacity)

    def close(self) -> None:
        """Give the pages back now."""
        self.slots.close()


def join(slot: Bytes, planes: Sequence[Planes]) -> None:
    """Make int8 codes and their scales of planes and the copy's scales, in place."""
    for each in planes:
        codes = slot[each.codes : each.codes + each.nbytes]
        _join(codes, codes[: each.nbytes // 2].copy())
        scale = slot[each.scale : each.scale + each.scales].view(np.float16)
        scale /= np.float16(STEP)  # exact: the copy's scale is this one times 16


@jit
def _join(codes: Bytes, high: Bytes) -> None:
    """codes [n]: the lower plane is its second half, which is overwritten behind what is read."""
    half = high.size
    for i in range(half):
        h, low = high[i], codes[half + i]
        codes[2 * i] = ((h & 15) << 4) - 128 + (low & 15) - 8
        codes[2 * i + 1] = (h & 240) - 128 + (low >> 4) - 8
