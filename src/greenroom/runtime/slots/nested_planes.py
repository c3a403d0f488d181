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

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.layout import Copy

STEP = 16  # what h counts in
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MatrixPlanes:
    """Where one matrix lies in the slot of an exact expert: its codes and scales."""

    codes: int
    nbytes: int
    scale: int
    scales: int


@dataclass(frozen=True)
class NestedLayout:
    """How experts of a layer are joined.

    planes: of each matrix
    copied: what goes from a copy's slot to an expert's, where only the rest is fetched
    totals: bytes that are to come, by the copies that an extent is read with
    """

    planes: tuple[MatrixPlanes, ...]
    copied: tuple[Copy, ...]
    totals: Mapping[tuple[Copy, ...], int]


class PlaneJoiner:
    """What is still to come into each slot; joins planes when the last byte is there. Thread-safe
    for different slots, and for different chunks of one."""

    def __init__(self, nestings: Sequence[NestedLayout]) -> None:
        """`nestings` are those of each layer."""
        self._nestings = nestings
        self._by_copies = {c: (each, n) for each in nestings for c, n in each.totals.items()}
        self._left: dict[int, int] = {}  # slot -> bytes that are still to come
        self._lock = threading.Lock()

    def copied(self, layer: int) -> tuple[Copy, ...]:
        """What goes from a copy's slot to an expert's."""
        return self._nestings[layer].copied

    def arrived(self, slot: int, memory: Bytes, copies: tuple[Copy, ...], nbytes: int) -> None:
        """So many bytes of an extent that is read with these copies are in a slot's memory."""
        nesting, total = self._by_copies[copies]
        with self._lock:
            left = self._left[slot] = self._left.get(slot, total) - nbytes
            if left == 0:
                del self._left[slot]
        if left == 0:
            join(memory, nesting.planes)

    def clear(self, slot: int) -> None:
        """A new piece is about to come into this slot."""
        with self._lock:
            self._left.pop(slot, None)


def join(slot: Bytes, planes: Sequence[MatrixPlanes]) -> None:
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
