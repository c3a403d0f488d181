"""Slots in device memory: slabs of equal slots, one allocation a segment.

A resize adds or drops segments and moves no other: kernels find a slot by its address. Bytes are
copied from host memory on a stream of their own. A slot is written only after every launched
computation that reads it: `mark_computed` records a mark behind it, and a copy waits for the mark
of its slot alone.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from greenroom.core.layout import ALIGNMENT, ITEMSIZE, Copy, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.slots.tier import SlotPool, overlap

SEGMENT_BYTES = 256 << 20


class DeviceSlots(SlotPool):
    """Slots on an engine's device. `stride` bytes each, a multiple of the alignment."""

    def __init__(self, engine: Engine, capacity: int, stride: int, reserve: int) -> None:
        """`reserve` is the largest capacity that a resize may ask for. DeviceError where the device
        has no room for `capacity`."""
        if capacity < 1:
            raise DeviceError("a cache needs at least one slot")
        assert stride % ALIGNMENT == 0
        self.engine, self.stride, self.reserve = engine, stride, max(capacity, reserve)
        self.capacity = 0
        self._segments: list[Tensor] = []
        self._firsts: list[int] = []  # slot that each segment begins with
        self._marks: dict[int, Mark] = {}  # of the last group from each slot
        self._scratch: dict[int, Tensor] = {}  # by thread: for bytes that are rearranged on arrival
        self.trim(capacity)

    def bytes(self, slot: int) -> Tensor:
        """The slot's bytes, [stride] uint8, on the device."""
        number = bisect_right(self._firsts, slot) - 1
        at = (slot - self._firsts[number]) * self.stride
        return self._segments[number][at : at + self.stride]

    def address(self, slot: int) -> int:
        """Where a slot begins in the device's memory; others need not follow it."""
        number = bisect_right(self._firsts, slot) - 1
        segment = self._segments[number].data_ptr()
        return segment + (slot - self._firsts[number]) * self.stride

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """A tensor of the expert in a slot, as a view."""
        flat = self.bytes(slot)[spec.offset : spec.offset + spec.nbytes]
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def mark_computed(self, slots: Sequence[int]) -> None:
        """A group from these slots has been ordered on the current stream."""
        mark = self.engine.mark()
        for slot in slots:
            self._marks[slot] = mark

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Put what `data` (bytes from `start` on of an extent) holds of `copies` into a slot.

        Returns when the bytes are there. DeviceError where the device fails.
        """
        source, target = torch.from_numpy(data), self.bytes(slot)
        with self.engine.copying(self._marks.get(slot)):
            for copy in copies:
                if not copy.contiguous:
                    self._rearrange(source[copy.source :], target[copy.target :], copy)
                elif found := overlap(copy, start, data.size):
                    target[found[1]].copy_(source[found[0]], non_blocking=True)

    def _rearrange(self, source: Tensor, target: Tensor, copy: Copy) -> None:
        """Transpose, interleave or cast a block: it comes as it is, the device does the rest."""
        nbytes = _span(copy.shape, copy.source_strides, ITEMSIZE[copy.source_dtype])
        raw = self._scratch_of(nbytes)[:nbytes]
        raw.copy_(source[:nbytes], non_blocking=True)
        _strided(target, copy.target_dtype, copy.shape, copy.target_strides).copy_(
            _strided(raw, copy.source_dtype, copy.shape, copy.source_strides)
        )

    def _scratch_of(self, nbytes: int) -> Tensor:
        """Room for one block, of the lane that asks: its `copying` ends before it asks again."""
        thread = threading.get_ident()
        found = self._scratch.get(thread)
        if found is None or found.numel() < nbytes:
            found = self._scratch[thread] = self.engine.empty(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        return found

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another, once what was computed from either has been."""
        self.engine.wait(self._marks.get(source))
        with self.engine.copying(self._marks.get(target)):
            self.bytes(target).copy_(self.bytes(source))

    def trim(self, capacity: int) -> None:
        """Have this many slots: by one more run of segments, or without those above."""
        if not 1 <= capacity <= self.reserve:
            raise DeviceError(f"between 1 and {self.reserve} slots can be had, not {capacity}")
        while self._firsts and self._firsts[-1] >= capacity:
            self._firsts.pop()
            dropped = self._segments.pop()
            for slot in [s for s in self._marks if s >= self._end]:
                self.engine.wait(self._marks.pop(slot))  # what reads it is ordered, not done
            del dropped
        if self._end < capacity:
            self._grow(capacity)
        self.capacity = capacity

    def fitting_capacity(self, capacity: int) -> int:
        """The most slots that take the memory of no more than `capacity`: a segment that is there
        is given back as a whole, but for the first one."""
        if capacity >= self._end:
            return capacity
        number = bisect_right(self._firsts, capacity) - 1
        return self._firsts[number] or capacity

    def _grow(self, capacity: int) -> None:
        each, before, known = max(1, SEGMENT_BYTES // self.stride), len(self._segments), self._end
        try:
            while (first := self._end) < capacity:
                count = min(each, capacity - first)
                self._segments.append(self.engine.empty(count * self.stride))
                self._firsts.append(first)
        except DeviceError:
            del self._segments[before:], self._firsts[before:]
            raise
        # What had this memory before may have been ordered and not yet computed.
        self._marks |= dict.fromkeys(range(known, capacity), self.engine.mark())

    @property
    def _end(self) -> int:
        """The slot after the last segment's."""
        if not self._segments:
            return 0
        return self._firsts[-1] + self._segments[-1].numel() // self.stride

    def close(self) -> None:
        """Let go of the memory."""
        self._segments.clear()
        self._firsts.clear()
        self._marks.clear()
        self._scratch.clear()
        self.capacity = 0


def _span(shape: tuple[int, int], strides: tuple[int, int], itemsize: int) -> int:
    """Bytes from the first element of a strided block to the end of its last."""
    return (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + itemsize


def _strided(data: Tensor, dtype: str, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """Bytes as a two-dimensional block of a type; strides in bytes."""
    size = ITEMSIZE[dtype]
    whole = data[: data.numel() // size * size].view(getattr(torch, dtype))
    return whole.as_strided(shape, (strides[0] // size, strides[1] // size), whole.storage_offset())
