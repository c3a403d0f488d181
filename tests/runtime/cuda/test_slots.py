"""Slots in segments, and what a copy waits for: on the CPU in a GPU's place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.layout import Copy, TensorSpec
from greenroom.errors import DeviceError
from greenroom.runtime.cuda import slots as module
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slots import DeviceSlots, slots_in_segment
from greenroom.runtime.slots.host import HostSlots


class RecordingEngine(Engine):
    """Notes what is asked of it; marks are numbers; `room` bytes can be had."""

    def __init__(self, room: float = float("inf")) -> None:
        self.did: list[tuple[str, Any]] = []
        self.room, self.marks, self.stream = room, 0, "computes"

    def empty(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.room:
            raise DeviceError("the GPU has no room")
        self.room -= nbytes
        return super().empty(nbytes)

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    @contextlib.contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        self.did.append(("copy after", after))
        yield

    def wait(self, mark: Any) -> None:
        self.did.append(("wait", mark))

    def current_stream(self) -> Any:
        return self.stream

    def order(self, before: Any, after: Any) -> None:
        self.did.append((f"{after} waits for", before))


def run(nbytes: int) -> tuple[Copy, ...]:
    return (Copy(0, 0, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8"),)


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(module, "SEGMENT_BYTES", 256)  # four slots


def test_a_resize_adds_and_drops_segments_and_moves_no_other(small_segments):
    slots = DeviceSlots(RecordingEngine(), 1, 64, reserve=20)
    first = slots.address(0)
    slots.trim(11)
    assert [s.numel() // 64 for s in slots._segments] == [1, 4, 4, 2]
    for slot in range(11):
        slots.bytes(slot)[:] = slot
    where = [slots.address(slot) for slot in range(11)]
    assert where[0] == first
    assert where[3] == where[1] + 128  # of one segment
    slots.trim(6)  # the segment of slots 5 to 8 stays
    assert [s.numel() // 64 for s in slots._segments] == [1, 4, 4]
    assert [slots.address(slot) for slot in range(6)] == where[:6]
    assert [int(slots.bytes(slot)[0]) for slot in range(6)] == list(range(6))
    slots.trim(9)
    assert slots.address(8) == where[8]
    with pytest.raises(DeviceError, match="between 0 and 20"):
        slots.trim(21)


def test_segments_are_held_until_all_of_their_slots_are_dropped(small_segments):
    slots = DeviceSlots(RecordingEngine(), 1, 64, reserve=20)
    slots.trim(11)  # segments of 1, 4, 4 and 2 slots
    held = {1: 1, 2: 5, 5: 5, 6: 9, 9: 9, 10: 11, 11: 11, 12: 12}
    assert {n: slots.held_bytes(n) // 64 for n in held} == held
    for capacity, fitting in {13: 13, 11: 11, 10: 9, 8: 5, 3: 1, 1: 1}.items():
        assert slots.fitting_capacity(capacity, 1, capacity) == fitting
    assert slots.fitting_capacity(8, 7, 8) == 7
    slots.trim(0)
    assert slots.held_bytes(3) == 3 * 64


def test_segments_are_smaller_where_a_device_has_many_pools():
    assert [module.segment_bytes(n) >> 20 for n in (1, 2, 49)] == [256, 128, 32]
    slots = DeviceSlots(RecordingEngine(), 1, 1 << 20, 100, segment_bytes=4 << 20)
    slots.trim(6)
    assert [s.numel() >> 20 for s in slots._segments] == [1, 4, 1]


@pytest.mark.parametrize("stride", [64, 100_032, 1_327_104, 4_718_592, 9_437_184, 11_010_048])
def test_segments_fill_whole_units_of_memory(stride):
    """Torch rounds them up, and gives less than 10 MiB a part of other memory."""
    nbytes = stride * slots_in_segment(stride, module.LEAST_SEGMENT_BYTES)
    assert 10 << 20 <= nbytes <= module.LEAST_SEGMENT_BYTES
    assert -nbytes % module.UNIT_BYTES <= nbytes / 20


def test_a_slot_that_is_larger_than_a_segment_is_one():
    assert slots_in_segment(300 << 20, 256 << 20) == 1


def test_a_device_without_room_keeps_what_it_had(small_segments):
    slots = DeviceSlots(RecordingEngine(room=64 * 6), 2, 64, reserve=20)
    slots.bytes(1)[:] = 7
    with pytest.raises(DeviceError, match="no room"):
        slots.trim(12)
    assert slots.capacity == 2
    assert len(slots._segments) == 1
    assert int(slots.bytes(1)[5]) == 7


def test_a_copy_waits_for_the_last_group_from_its_slot_alone():
    engine = RecordingEngine()
    slots = DeviceSlots(engine, 4, 64, reserve=4)
    fresh = engine.marks  # whatever had the memory before
    slots.mark_computed([0, 2])
    data = np.arange(64, dtype=np.uint8)
    for slot in (0, 1, 2):
        slots.write(slot, run(64), data, 0)
    assert engine.did == [("copy after", m) for m in (fresh + 1, fresh, fresh + 1)]
    slots.mark_computed([2])
    engine.did.clear()
    slots.move(2, 1)
    assert engine.did == [("wait", fresh + 2), ("copy after", fresh)]
    assert slots.bytes(1).tolist() == data.tolist()


def test_a_mark_on_another_stream_is_behind_the_earlier_ones():
    """A slot has one mark, also if threads with streams of their own compute from it."""
    engine = RecordingEngine()
    slots = DeviceSlots(engine, 2, 64, reserve=2)
    slots.mark_computed([0])
    engine.stream = "another"
    slots.mark_computed([0])
    slots.mark_computed([1])
    engine.stream = "computes"
    slots.mark_computed([1])
    assert engine.did == [("another waits for", "computes"), ("computes waits for", "another")]


def test_slots_are_freed_when_all_groups_have_been_computed():
    engine = RecordingEngine()
    slots = DeviceSlots(engine, 2, 64, reserve=2)
    slots.mark_computed([0])
    slots.mark_computed([1])
    slots.close()
    assert engine.did == [("wait", engine.marks)]

    class Lost(RecordingEngine):
        def wait(self, mark: Any) -> None:
            raise DeviceError("the GPU failed")

    slots = DeviceSlots(Lost(), 2, 64, reserve=2)
    slots.close()
    assert slots.capacity == 0


def test_memory_is_freed_though_a_kernel_has_a_view_of_slot_0():
    for free in (lambda slots: slots.trim(0), DeviceSlots.close):
        slots = DeviceSlots(Engine(), 2, 64, reserve=2)
        view = slots.tensor(0, TensorSpec("slot", (16,), "float32", 0))
        free(slots)
        assert view.untyped_storage().nbytes() == 0


def test_a_segment_is_given_up_when_it_has_been_computed_from(small_segments):
    engine = RecordingEngine()
    slots = DeviceSlots(engine, 8, 64, reserve=8)
    slots.mark_computed([6])
    engine.did.clear()
    slots.trim(4)
    assert ("wait", engine.marks) in engine.did
    assert slots.capacity == 4


@given(start=st.integers(0, 39), length=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_chunk_writes_its_part_of_each_tensor_and_nothing_else(start, length):
    data = np.arange(80, dtype=np.uint8)
    cells = ((1, 10), (40, 4), (40, 4), "float32", "float32")
    copies = (Copy(0, 64, *cells), Copy(40, 0, *cells))
    ours, theirs = DeviceSlots(Engine(), 1, 128, 1), HostSlots(1, 128)
    ours.bytes(0).zero_()
    stop = min(start + length, 80)
    for slots in (ours, theirs):
        slots.write(0, copies, data[start:stop], start)
    assert ours.bytes(0).tolist() == theirs.bytes(0).tolist()


@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16", "float16"])
@given(shape=st.tuples(st.integers(1, 7), st.integers(1, 7)), offset=st.sampled_from([0, 8, 40]))
@settings(max_examples=10, deadline=None)
def test_what_is_rearranged_on_the_device_is_what_the_host_would_have_made(
    source_dtype, target_dtype, shape, offset
):
    rows, columns = shape
    source = torch.randn(rows, columns).to(getattr(torch, source_dtype))
    width, wide = source.element_size(), getattr(torch, target_dtype).itemsize
    raw = source.view(torch.uint8).numpy().reshape(-1)
    data = np.concatenate([np.zeros(offset, np.uint8), raw])
    copy = Copy(
        offset, 64, (columns, rows), (width, columns * width), (rows * wide, wide),
        source_dtype, target_dtype,
    )  # fmt: skip
    slots = DeviceSlots(Engine(), 1, 512, 1)
    slots.write(0, (copy,), data, 0)
    got = slots.tensor(0, TensorSpec("x", (columns, rows), target_dtype, 64))
    assert torch.equal(got, source.T.to(got.dtype))


def test_copies_are_rearranged_in_and_out_of_inference_mode():
    """One thread calls the model both ways: transformers' `generate` is in no inference mode."""
    source = torch.randn(3, 5)
    data = source.view(torch.uint8).numpy().reshape(-1)
    copy = Copy(0, 0, (5, 3), (4, 20), (6, 2), "float32", "bfloat16")
    slots = DeviceSlots(Engine(), 1, 64, 1)
    for mode in (True, False, True):
        slots.bytes(0).zero_()
        with torch.inference_mode(mode):
            slots.launch_write(0, (copy,), data, 0)
        got = slots.tensor(0, TensorSpec("x", (5, 3), "bfloat16", 0))
        assert torch.equal(got, source.T.bfloat16())
