"""Slots for experts in host memory: one anonymous mapping, divided into equal slots.

Address space is reserved for the largest capacity; a page takes memory once it is written. A cache
that shrinks returns the pages of its last slots to the system at once. So a resize changes no
address, and kernels address a slot by a base address, a stride and the slot's number.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
import torch

from greenroom.core.layout import ITEMSIZE, Copy, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.memory.system import reserve_memory
from greenroom.runtime.slots.forms import arrange
from greenroom.runtime.slots.nested_planes import PlaneJoiner, join
from greenroom.runtime.slots.tier import SlotPool, overlap

_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}


class PanelOrder(Protocol):
    """Protocol of the order of panels, in which kernels read encoded matrices.

    `panels` are the bytes [rows * row_bytes] of a matrix in that order, `first` is a byte's number
    in the order of rows.
    """

    def arrange(
        self, encoding: str, data: np.ndarray, first: int, panels: np.ndarray, row_bytes: int
    ) -> None:
        """Write the bytes `data` of a matrix, from number `first` on, to their places."""

    def restore(self, encoding: str, panels: np.ndarray, row_bytes: int) -> np.ndarray:
        """Return the bytes of a matrix in the order of rows."""


class HostSlots(SlotPool):
    """Slots for experts in host memory, `stride` bytes each.

    Slot s begins at the address `base + s * stride`.
    """

    def __init__(
        self,
        capacity: int,
        stride: int,
        reserve: int | None = None,
        *,
        plane_joiner: PlaneJoiner | None = None,
        panel_order: PanelOrder | None = None,
        memory: np.ndarray | None = None,
    ) -> None:
        """Reserve host memory for the slots, or use the caller's.

        reserve: the largest number of slots that `trim` accepts (default: `capacity`)
        plane_joiner: joins the planes of nested experts
        panel_order: writes copies that have `panels`
        memory: the caller's memory; these slots must be neither trimmed nor closed

        Raises DeviceError if there is not enough address space."""
        self.capacity, self.stride, self._plane_joiner = capacity, stride, plane_joiner
        self._panel_order = panel_order
        self.reserve = max(capacity, reserve or 0, 1)
        if memory is None:
            self._map = reserve_memory(self.reserve * stride, large_pages=True)
            memory = np.frombuffer(self._map, np.uint8)
        self._bytes = memory
        self.base: int = memory.ctypes.data
        self._torch = torch.from_numpy(memory)

    def address(self, slot: int) -> int:
        return self.base + slot * self.stride

    def bytes(self, slot: int) -> np.ndarray:
        return self._bytes[slot * self.stride : (slot + 1) * self.stride]

    def tensor(self, slot: int, spec: TensorSpec) -> torch.Tensor:
        """Return a view of one tensor of the expert in a slot; of one in panels, a copy in rows."""
        start = slot * self.stride + spec.offset
        flat = self._torch[start : start + spec.nbytes]
        if spec.panels:
            assert self._panel_order is not None
            row_bytes = spec.nbytes // spec.shape[0]
            rows = self._panel_order.restore(spec.panels, flat.numpy(), row_bytes)
            flat = torch.from_numpy(rows)
        return flat.view(_TORCH[spec.dtype]).view(spec.shape)

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Write a chunk of an expert into a slot in host memory (see `SlotPool.write`).

        A nested expert is stored as two 4-bit planes, which are joined after its last chunk.
        """
        target = self.bytes(slot)
        _copy(target, copies, data, start, self._panel_order)
        if self._plane_joiner is not None:
            join(target, self._plane_joiner.count_bytes(slot, copies, data.size))

    def fill(self, slot: int, copy: np.ndarray, layer: int) -> None:
        """Copy to a nested expert's slot the bytes that its int4 copy shares.

        A nested expert is int8, stored as two 4-bit planes; one of them is the int4 copy's codes.
        `copy` has the bytes of the copy's slot. The other plane has to be read from the store.
        """
        assert self._plane_joiner is not None
        _copy(self.bytes(slot), self._plane_joiner.from_copy(layer), copy, 0)

    def clear(self, slot: int) -> None:
        if self._plane_joiner is not None:
            self._plane_joiner.clear(slot)

    def move(self, source: int, target: int) -> None:
        self.bytes(target)[:] = self.bytes(source)

    def trim(self, capacity: int) -> None:
        """Set the number of slots, and return the pages of dropped slots to the system.

        Raises DeviceError unless the number is from 0 to `reserve`.
        """
        if not 0 <= capacity <= self.reserve:
            raise DeviceError(
                f"the cache of experts can have between 0 and {self.reserve} slots, not {capacity}:"
                " give a cache size within these bounds"
            )
        if capacity < self.capacity:
            page = mmap.PAGESIZE
            begin = -(-capacity * self.stride // page) * page
            end = min(-(-self.capacity * self.stride // page) * page, len(self._map))
            if begin < end:
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self.capacity = capacity

    def close(self) -> None:
        """Return the pages of all slots to the system now.

        The address range is freed when the last array that views the memory is deleted.
        """
        self._map.madvise(mmap.MADV_DONTNEED)
        self.capacity = 0


def _copy(
    slot: np.ndarray,
    copies: tuple[Copy, ...],
    data: np.ndarray,
    start: int,
    panel_order: PanelOrder | None = None,
) -> None:
    """Write a chunk of an expert into a slot's bytes (see `SlotPool.write`)."""
    for copy in copies:
        if not copy.contiguous:
            _transform(data, slot, copy)
        elif ranges := overlap(copy, start, data.size):
            source, target = ranges
            if copy.panels:
                assert panel_order is not None
                panels = slot[copy.target :][: copy.nbytes]
                first, row_bytes = target.start - copy.target, copy.shape[1]
                panel_order.arrange(copy.panels, data[source], first, panels, row_bytes)
            else:
                slot[target] = data[source]


def _transform(data: np.ndarray, slot: np.ndarray, copy: Copy) -> None:
    """Transpose, interleave, cast or arrange a block of weights on its way into a slot."""
    target = _strided(slot[copy.target :], copy.target_dtype, copy.shape, copy.target_strides)
    if copy.form:
        arrange(copy.form, data[copy.source :][: copy.nbytes], target)
        return
    source = _strided(data[copy.source :], copy.source_dtype, copy.shape, copy.source_strides)
    if copy.source_dtype == copy.target_dtype:
        target[...] = source
    else:  # numpy knows neither bfloat16 nor the types of 8 bits
        torch.from_numpy(target).view(_TORCH[copy.target_dtype]).copy_(
            torch.from_numpy(source).view(_TORCH[copy.source_dtype])
        )


def _strided(
    data: np.ndarray, dtype: str, shape: tuple[int, int], strides: tuple[int, int]
) -> np.ndarray:
    """View bytes as a two-dimensional block of integers as wide as the dtype."""
    width = {1: np.int8, 2: np.int16, 4: np.int32}[ITEMSIZE[dtype]]
    items = data[: data.size // ITEMSIZE[dtype] * ITEMSIZE[dtype]].view(width)
    return np.lib.stride_tricks.as_strided(items, shape, strides)
