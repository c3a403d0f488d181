"""Nested experts: int8 codes, stored as two planes of four bits and joined here.

A nested int8 expert has codes 16 h + l: h is the code of its int4 copy, in steps of 16 scales, and
l, from -8 to 7, is the remainder. Bytes arrive plane by plane, in any order: h goes to the first
half of the memory for the codes, l to the second. The thread that delivers the last byte joins the
planes in place; then the slot holds an ordinary int8 expert.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.layout import Copy

STEP = 16  # scales of the int8 expert in one step of h
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MatrixPlanes:
    """Offsets and sizes of one matrix's codes and scales in a nested expert's slot."""

    codes: int
    nbytes: int
    scale: int
    scales: int


@dataclass(frozen=True)
class NestedLayout:
    """Slot layout of a layer's nested experts, stored as two planes of four bits.

    planes: of each matrix
    from_copy: copies from a low-precision copy's slot to its expert's, if only the rest is fetched
    totals: expected bytes, by the copies with which an extent is read
    """

    planes: tuple[MatrixPlanes, ...]
    from_copy: tuple[Copy, ...]
    totals: Mapping[tuple[Copy, ...], int]


class PlaneJoiner:
    """Joins a nested expert's planes once the last missing byte is in its slot.

    Thread-safe for different slots, and for different chunks of one.
    """

    def __init__(self, nestings: Sequence[NestedLayout]) -> None:
        """Take the slot layouts of the nested experts, by layer.

        `nestings` has one layout for each layer.
        """
        self._nestings = nestings
        self._by_copies = {c: (each, n) for each in nestings for c, n in each.totals.items()}
        self._missing: dict[int, int] = {}  # slot -> missing bytes
        self._lock = threading.Lock()

    def from_copy(self, layer: int) -> tuple[Copy, ...]:
        """List the copies from a low-precision copy's slot to its exact expert's slot."""
        return self._nestings[layer].from_copy

    def count_bytes(self, slot: int, memory: Bytes, copies: tuple[Copy, ...], nbytes: int) -> None:
        """Count bytes that arrived in a slot; join the expert's planes after the last."""
        nesting, total = self._by_copies[copies]
        with self._lock:
            missing = self._missing[slot] = self._missing.get(slot, total) - nbytes
            if missing == 0:
                del self._missing[slot]
        if missing == 0:
            join(memory, nesting.planes)

    def clear(self, slot: int) -> None:
        """Forget the bytes counted in a slot, before another expert is read into it."""
        with self._lock:
            self._missing.pop(slot, None)


def join(slot: Bytes, planes: Sequence[MatrixPlanes]) -> None:
    """Join an expert's 4-bit planes to int8 codes in place, and divide its scales.

    The scales are the low-precision copy's.
    """
    for each in planes:
        codes = slot[each.codes : each.codes + each.nbytes]
        _join(codes, codes[: each.nbytes // 2].copy())
        scale = slot[each.scale : each.scale + each.scales].view(np.float16)
        scale /= np.float16(STEP)  # exact: the copy's scale is this one times 16


@jit
def _join(codes: Bytes, high: Bytes) -> None:
    """Join the planes; the lower one is the second half of `codes` [n], read before overwritten."""
    half = high.size
    for i in range(half):
        h, low = high[i], codes[half + i]
        codes[2 * i] = ((h & 15) << 4) - 128 + (low & 15) - 8
        codes[2 * i + 1] = (h & 240) - 128 + (low >> 4) - 8
