"""Nested experts: int8 codes that are stored as two 4-bit planes and joined in their slot.

A nested int8 expert has codes 16 h + l. The high half h, from -8 to 7, is the code of the expert's
int4 copy, whose scale is 16 times the int8 scale; the low half l, from -8 to 7, is the remainder.
The bytes of both planes arrive in any order: the plane of h goes to the first half of the memory
for the codes, the plane of l to the second half. The thread that delivers the last byte joins the
planes in place; then the slot contains an ordinary int8 expert.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.layout import Copy

STEP = 16  # scales of the int8 expert in one step of h
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MatrixPlanes:
    """Offsets and sizes in bytes of a nested int8 expert's matrix in its slot.

    codes, nbytes: offset and size of the int8 codes
    scale, scales: offset and size of the float16 scales
    """

    codes: int
    nbytes: int
    scale: int
    scales: int


@dataclass(frozen=True)
class NestedLayout:
    """Slot layout of a layer's nested int8 experts, which are stored as two 4-bit planes.

    planes: the planes of each matrix
    from_copy: copies from the slot of the expert's int4 copy to the expert's slot, for experts of
        which only the remainder is fetched
    totals: number of bytes after which an expert is complete, for a read of both planes and for a
        read of the remainder only; the keys are the copies that write the bytes of such a read
    """

    planes: tuple[MatrixPlanes, ...]
    from_copy: tuple[Copy, ...]
    totals: Mapping[tuple[Copy, ...], int]


class PlaneJoiner:
    """Finds when the two 4-bit planes of a nested int8 expert must be joined: after its last chunk.

    Thread-safe for different slots, and for different chunks of one slot.
    """

    def __init__(self, nestings: Sequence[NestedLayout]) -> None:
        """Make a joiner for nested experts; `nestings` has one slot layout for each layer."""
        self._nestings = nestings
        self._by_copies = {c: (each, n) for each in nestings for c, n in each.totals.items()}
        self._missing: dict[int, int] = {}  # slot -> missing bytes
        self._lock = threading.Lock()

    def from_copy(self, layer: int) -> tuple[Copy, ...]:
        """Return the copies from the slot of an int4 copy to its int8 expert's slot."""
        return self._nestings[layer].from_copy

    def count_bytes(
        self, slot: int, copies: tuple[Copy, ...], nbytes: int
    ) -> tuple[MatrixPlanes, ...]:
        """Count bytes that arrived in a slot; return the planes to join, after the last bytes.

        `copies` are those of the extent that the bytes belong to.
        """
        nesting, total = self._by_copies[copies]
        with self._lock:
            missing = self._missing[slot] = self._missing.get(slot, total) - nbytes
            if missing == 0:
                del self._missing[slot]
        return nesting.planes if missing == 0 else ()

    def clear(self, slot: int) -> None:
        """Forget the bytes counted in a slot, before another expert is read into the slot."""
        with self._lock:
            self._missing.pop(slot, None)


def join(slot: Bytes, planes: Sequence[MatrixPlanes]) -> None:
    """Join an expert's two 4-bit planes to int8 codes in its slot.

    The expert's scales, which were read as those of its int4 copy, are divided by 16.
    """
    for each in planes:
        codes = slot[each.codes : each.codes + each.nbytes]
        _join(codes, codes[: each.nbytes // 2].copy())
        scale = slot[each.scale : each.scale + each.scales].view(np.float16)
        scale /= np.float16(STEP)  # exact: the copy's scale is this one times 16


def join_on_device(slot: Tensor, planes: Sequence[MatrixPlanes]) -> None:
    """Join an expert's two 4-bit planes in its slot on a device."""
    for each in planes:
        codes = slot[each.codes : each.codes + each.nbytes]
        high, low = codes.clone().view(2, -1)  # the codes overwrite both
        pairs = codes.view(-1, 2)
        pairs[:, 0] = (high << 4) + (low & 15) - (128 + 8)
        pairs[:, 1] = (high & 240) + (low >> 4) - (128 + 8)
        slot[each.scale : each.scale + each.scales].view(torch.float16).div_(STEP)


@jit
def _join(codes: Bytes, high: Bytes) -> None:
    """Join the plane `high` and the low plane, the second half of `codes`, in place."""
    half = high.size
    for i in range(half):
        h, low = high[i], codes[half + i]  # read before this byte is overwritten
        codes[2 * i] = ((h & 15) << 4) - 128 + (low & 15) - 8
        codes[2 * i + 1] = (h & 240) - 128 + (low >> 4) - 8
