"""Slots for experts in device memory: equal slots, allocated in segments of at most 256 MiB.

A resize adds or frees segments and moves no slot, since kernels find a slot by its address. A
stream of its own copies bytes from host memory. A slot is written only after every launched
computation that reads the slot: `mark_computed` records an event after the computation, and a copy
waits only for the event of the slot that it writes. A slot has one event, the last; each event is
behind all earlier ones, also if threads compute on several streams.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.layout import ALIGNMENT, ITEMSIZE, Copy, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.slots import block_fields
from greenroom.runtime.slots.forms import arrange, as_integers
from greenroom.runtime.slots.nested_planes import PlaneJoiner, join_on_device
from greenroom.runtime.slots.tier import SlotPool, overlap

SEGMENT_BYTES = 256 << 20  # of a pool that has a device for itself
# Torch's allocator gives less than 10 MiB a part of 20 MiB, which it frees as a whole; it rounds
# more up to 2 MiB. Half a segment of this size has memory of its own.
LEAST_SEGMENT_BYTES = 32 << 20
UNIT_BYTES = 2 << 20


def segment_bytes(pools: int) -> int:
    """Return the most bytes of a segment, if a device has so many pools.

    Each pool has a last segment that is in use in part.
    """
    return max(SEGMENT_BYTES // pools, min(SEGMENT_BYTES, LEAST_SEGMENT_BYTES))


def slots_in_segment(stride: int, nbytes: int) -> int:
    """Return the number of slots in a segment of at most `nbytes`, at least one.

    A segment has half of these bytes or more. Rounding it up to whole units of memory takes the
    least memory a slot.
    """
    most = max(1, nbytes // stride)
    tried = range(most, max((most - 1) // 2, most - 64), -1)
    return min(tried, key=lambda count: -count * stride % UNIT_BYTES / count)


class DeviceSlots(SlotPool):
    """Slots for experts in a device's memory, `stride` bytes each.

    `stride` is a multiple of 64. Slots need not be consecutive in memory.

    last_mark: the last event of `mark_computed`
    addresses: those of all slots in device memory
    """

    def __init__(
        self,
        engine: Engine,
        capacity: int,
        stride: int,
        reserve: int,
        plane_joiner: PlaneJoiner | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        """Allocate `capacity` slots in device memory.

        reserve: the largest number of slots that `trim` accepts
        plane_joiner: finds when the planes of nested experts must be joined
        segment_bytes: the most bytes of a segment; None: SEGMENT_BYTES

        Raises DeviceError if the device has not enough memory.
        """
        assert stride % ALIGNMENT == 0
        self.engine, self.stride, self.reserve = engine, stride, max(capacity, reserve)
        self.capacity, self._plane_joiner = 0, plane_joiner
        self._segment_slots = slots_in_segment(stride, segment_bytes or SEGMENT_BYTES)
        self._parts: dict[int, tuple[Sequence[tuple[int, int]], list[Tensor]]] = {}
        self.addresses: NDArray[np.int64] = np.zeros(0, np.int64)
        self._segments: list[Tensor] = []
        self._first_slots: list[int] = []  # the first slot of each segment
        self._marks: dict[int, Mark] = {}  # behind the last group that reads each slot
        self.last_mark: Mark = None
        self._step_mark: Mark = None
        self._marked_slots = set[int]()  # since `begin_step`
        self._marked: Any = engine.current_stream()  # the stream of the last mark
        self._marking = threading.Lock()
        # By thread and stream: bytes before they are rearranged.
        self._scratch: dict[tuple[int, Any], Tensor] = {}
        self.trim(capacity)

    def bytes(self, slot: int) -> Tensor:
        """Return a slot's bytes on the device: [stride] uint8."""
        number = bisect_right(self._first_slots, slot) - 1
        at = (slot - self._first_slots[number]) * self.stride
        return self._segments[number][at : at + self.stride]

    def parts(self, slot: int, bounds: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return views of a slot's bytes, each from a first byte to an end.

        They are kept for the next call: to make a view takes as long as to launch a copy.
        """
        entry = self._parts.get(slot)
        if entry is None or entry[0] is not bounds:
            with torch.inference_mode(False):  # threads of both modes write to them
                content = self.bytes(slot)
                entry = self._parts[slot] = bounds, [content[begin:end] for begin, end in bounds]
        return entry[1]

    def address(self, slot: int) -> int:
        """Return the address of a slot in device memory."""
        return int(self.addresses[slot])

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """Return a view of one tensor of the expert in a slot; of one in fields, a copy in rows."""
        flat = self.bytes(slot)[spec.offset : spec.offset + spec.nbytes]
        if spec.fields:
            flat = block_fields.join(spec.fields, flat)
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def mark_computed(self, slots: Sequence[int]) -> None:
        """Record an event after launched computation that reads the given slots.

        The calling thread has launched the computation on its current stream.
        """
        with self._marking:
            self._marks.update(dict.fromkeys(slots, self._mark()))
            self._marked_slots.update(slots)

    def begin_step(self) -> None:
        """Record an event for `mark_older`, before the groups of a step."""
        with self._marking:
            self._step_mark = self._mark()
            self._marked_slots.clear()

    def mark_older(self, slot: int) -> None:
        """Let later writes to a slot wait for all work before this step.

        They also wait for groups of the step that read the slot, but for no others, as after
        `mark_computed`.
        """
        with self._marking:
            if slot not in self._marked_slots:
                self._marks[slot] = self._step_mark

    def mark_of(self, slot: int) -> Mark:
        """Return the event that writes to a slot wait for."""
        return self._marks.get(slot)

    def _mark(self) -> Mark:
        """Record an event on the current stream, behind all events that were recorded before."""
        stream = self.engine.current_stream()
        if stream != self._marked:
            self.engine.order(self._marked, stream)
            self._marked = stream
        self.last_mark = self.engine.mark()
        return self.last_mark

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        """Write a chunk of an expert into a device slot, and wait for its arrival.

        See `SlotPool.write` for the arguments. Raises DeviceError if the device fails.
        """
        with self.engine.copying(self._marks.get(slot)):
            self._copy(slot, copies, data, start)
        if self._plane_joiner is None:
            return
        if planes := self._plane_joiner.count_bytes(slot, copies, data.size):
            with self.engine.copying(None):
                join_on_device(self.bytes(slot), planes)

    @property
    def joins_planes(self) -> bool:
        """Tell whether experts are nested, whose planes are joined once all chunks have come."""
        return self._plane_joiner is not None

    def launch_write(
        self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int
    ) -> None:
        """Launch the copies of `write` on the calling thread's stream, and wait for nothing.

        `data` stays as it is until they have run. `mark_computed` follows.
        """
        self._copy(slot, copies, data, start)
        if self._plane_joiner is not None and (
            planes := self._plane_joiner.count_bytes(slot, copies, data.size)
        ):
            join_on_device(self.bytes(slot), planes)

    def _copy(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None:
        source, target = torch.from_numpy(data), self.bytes(slot)
        for copy in copies:
            ranges = overlap(copy, start, data.size) if copy.contiguous else None
            if copy.matrix is not None:
                self._separate(source, target, copy, copy.matrix, ranges)
            elif not copy.contiguous:
                self._rearrange(source[copy.source :], target[copy.target :], copy)
            elif ranges:
                target[ranges[1]].copy_(source[ranges[0]], non_blocking=True)

    def plain_ranges(
        self, writes: Sequence[tuple[tuple[Copy, ...], np.ndarray, int]]
    ) -> list[tuple[Tensor, int, int]] | None:
        """Return what `launch_write` copies, if it copies bytes as they are; else None.

        writes: arguments of `launch_write`, without the slot

        The result has a source, and its first byte and end in a slot, for each copy. Neighbours
        in both memories are one copy.
        """
        ranges = list[tuple[Tensor, int, int]]()
        for copies, data, start in writes:
            parts = list[tuple[slice, slice]]()
            for copy in sorted(copies, key=lambda copy: copy.target):
                if self._plane_joiner or copy.matrix is not None or not copy.contiguous:
                    return None
                if (part := overlap(copy, start, data.size)) is None:
                    continue
                source, target = part
                if parts and (parts[-1][0].stop, parts[-1][1].stop) == (source.start, target.start):
                    before = parts.pop()
                    source = slice(before[0].start, source.stop)
                    target = slice(before[1].start, target.stop)
                parts.append((source, target))
            bytes_there = torch.from_numpy(data)
            ranges += [(bytes_there[source], to.start, to.stop) for source, to in parts]
        return ranges

    def fill(self, slot: int, copy: Tensor, layer: int) -> None:
        """Copy to a nested expert's slot the bytes that its int4 copy shares (see `SlotPool`)."""
        assert self._plane_joiner is not None
        target = self.bytes(slot)
        with self.engine.copying(self._marks.get(slot)):
            for each in self._plane_joiner.from_copy(layer):
                source = copy[each.source :][: each.nbytes]
                target[each.target :][: each.nbytes].copy_(source)

    def clear(self, slot: int) -> None:
        if self._plane_joiner is not None:
            self._plane_joiner.clear(slot)

    def _separate(
        self,
        source: Tensor,
        target: Tensor,
        copy: Copy,
        spec: TensorSpec,
        ranges: tuple[slice, slice] | None,
    ) -> None:
        """Copy bytes of a matrix to the device, then separate the fields of its blocks.

        ranges: of a contiguous copy, the bytes of the source and of the slot, if it has any here
        """
        matrix, at = target[spec.offset :][: spec.nbytes], copy.target - spec.offset
        if ranges:
            raw = self._to_scratch(source[ranges[0]])
            block_fields.separate(spec.fields, raw, ranges[1].start - spec.offset, matrix)
        elif not copy.contiguous:
            nbytes, width = _span(copy.shape, copy.source_strides, 1), copy.shape[1]
            raw = self._to_scratch(source[copy.source :][:nbytes])
            rows = _strided(raw, "uint8", copy.shape, copy.source_strides)
            step = copy.target_strides[0] // width
            block_fields.separate_rows(spec.fields, rows, at // width, step, matrix)

    def _rearrange(self, source: Tensor, target: Tensor, copy: Copy) -> None:
        """Copy a block of weights to the device, then transpose, interleave or cast it.

        A block that the file has in another form is arranged before.
        """
        if copy.form:
            arranged = torch.empty(copy.shape, dtype=getattr(torch, copy.target_dtype))
            arrange(copy.form, source[: copy.nbytes].numpy(), as_integers(arranged))
            place = _strided(target, copy.target_dtype, copy.shape, copy.target_strides)
            place.copy_(arranged)
            return
        nbytes = _span(copy.shape, copy.source_strides, ITEMSIZE[copy.source_dtype])
        raw = self._to_scratch(source[:nbytes])
        _strided(target, copy.target_dtype, copy.shape, copy.target_strides).copy_(
            _strided(raw, copy.source_dtype, copy.shape, copy.source_strides)
        )

    def _to_scratch(self, source: Tensor) -> Tensor:
        """Copy bytes to scratch memory on the device, of the calling thread and its stream.

        A stream has read it before the next copy writes there.
        """
        key, nbytes = (threading.get_ident(), self.engine.current_stream()), source.numel()
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < nbytes:
            scratch = self._scratch[key] = self.engine.empty(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        raw = scratch[:nbytes]
        raw.copy_(source, non_blocking=True)
        return raw

    def move(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another slot, after launched computation that reads either."""
        self.engine.wait(self._marks.get(source))
        with self.engine.copying(self._marks.get(target)):
            self.bytes(target).copy_(self.bytes(source))

    def trim(self, capacity: int) -> None:
        """Set the number of slots: allocate segments of slots, or free the last segments.

        A segment is freed if all of its slots are dropped. Raises DeviceError if the number is not
        from 0 to `reserve`, or if the device has not enough memory.
        """
        if not 0 <= capacity <= self.reserve:
            raise DeviceError(
                f"the cache of experts can have between 0 and {self.reserve} slots, not {capacity}:"
                " give a cache size within these bounds"
            )
        self._parts.clear()
        while self._first_slots and self._first_slots[-1] >= capacity:
            self._first_slots.pop()
            dropped = self._segments.pop()
            for slot in [s for s in self._marks if s >= self._end]:
                self.engine.wait(self._marks.pop(slot))  # a launched group may still read it
            self.engine.free(dropped)
        if self._end < capacity:
            self._grow(capacity)
        self.capacity = capacity
        each = [
            segment.data_ptr() + self.stride * np.arange(segment.numel() // self.stride)
            for segment in self._segments
        ]
        self.addresses = np.concatenate([*each, np.zeros(0, np.int64)])

    def held_bytes(self, capacity: int) -> int:
        """Return the bytes of all segments after a resize, which frees whole segments."""
        number = bisect_left(self._first_slots, capacity)
        if number < len(self._first_slots):
            return self._first_slots[number] * self.stride
        return max(capacity, self._end) * self.stride

    def _grow(self, capacity: int) -> None:
        before, first_new = len(self._segments), self._end
        try:
            while (first := self._end) < capacity:
                count = min(self._segment_slots, capacity - first)
                self._segments.append(self.engine.empty(count * self.stride))
                self._first_slots.append(first)
        except DeviceError:
            del self._segments[before:], self._first_slots[before:]
            raise
        # Launched work may still use the memory that was just allocated.
        with self._marking:
            self._marks |= dict.fromkeys(range(first_new, capacity), self._mark())

    @property
    def _end(self) -> int:
        """Number of device slots in all segments."""
        if not self._segments:
            return 0
        return self._first_slots[-1] + self._segments[-1].numel() // self.stride

    def close(self) -> None:
        """Free the device memory of all slots, when launched computation has read them."""
        with contextlib.suppress(DeviceError):  # of a device that is lost
            self.engine.wait(self.last_mark)
        for segment in self._segments:
            self.engine.free(segment)
        self._segments.clear()
        self._parts.clear()
        self._first_slots.clear()
        self._marks.clear()
        self._scratch.clear()
        self.capacity = 0


def _span(shape: tuple[int, int], strides: tuple[int, int], itemsize: int) -> int:
    """Return the bytes from the first to the end of the last element of a strided block."""
    return (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + itemsize


def _strided(data: Tensor, dtype: str, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """View bytes as a two-dimensional block of a type; strides are in bytes."""
    size = ITEMSIZE[dtype]
    items = data[: data.numel() // size * size].view(getattr(torch, dtype))
    return items.as_strided(shape, (strides[0] // size, strides[1] // size), items.storage_offset())
