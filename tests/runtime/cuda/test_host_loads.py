"""Copies from host memory that the thread that computes launches, in order with the computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy
from greenroom.core.scheduler.resident_steps import Loads
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.host_loads import HostLoads
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.slots.tier import ABSENT
from greenroom.runtime.store.disk import DiskStore, Staging

CHUNK_BYTES, SLOTS = 8192, 3


class Device(Engine):
    """A device that says what was launched, and when its events pass.

    times: of the events of `mark_time` that have passed, by their number
    """

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.times: dict[int, float] = {}
        self._marks = self._timed = 0

    def mark(self) -> Any:
        self._marks += 1
        self.did.append("mark")
        return f"mark {self._marks}"

    def wait(self, mark: Any) -> None:
        self.did.append(f"wait for {mark}")

    @contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        self.did.append(f"copy after {after}")
        yield

    def mark_time(self) -> Any:
        self._timed += 1
        self.did.append("time")
        return self._timed - 1

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        return self.times[end] - self.times[begin] if end in self.times else None


class Rig:
    """Host memory with some experts of a file, slots of a device, and their table."""

    def __init__(self, catalog: Any, in_host: Sequence[int]) -> None:
        self.engine = Device()
        self.store = DiskStore(catalog, chunk_bytes=CHUNK_BYTES)
        self.chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        self.memory = HostMemory(self.engine, self.chunks, 2, len(in_host))
        self.slots = DeviceSlots(self.engine, SLOTS, catalog.slot_bytes, SLOTS)
        self.table = SlotTable(self.engine, self.slots, [len(each) for each in self.chunks])
        self.loads = HostLoads(self.store.chunks, self.slots, self.memory, self.table)
        for slot, expert in enumerate(in_host):
            self.read(expert, slot)
        self.engine.did.clear()

    def read(self, expert: int, host_slot: int) -> None:
        """Read an expert from disk into a slot of host memory."""
        for number, chunk in enumerate(self.chunks[expert]):
            action = StartChunk(0, expert, -1, number, host_slot=host_slot)
            self.memory.read_chunk(action, chunk, self.store.read, Staging())

    def launch(self, *loads: tuple[int, int, int]) -> None:
        pieces, slots, host_slots = zip(*loads, strict=True)
        self.loads.launch(1, Loads(pieces, slots, host_slots), self.compute)

    def compute(self) -> None:
        self.engine.did.append("compute")
        self.table.write_changes()  # as the look-up does

    def content(self, slot: int) -> list[float]:
        values = self.slots.bytes(slot).numpy().view(np.float32)
        return np.unique(values).tolist()

    def expert_in(self, slot: int) -> list[int]:
        place = (self.slots.address(slot) - self.slots.address(0)) // 64
        return [n for n, offset in enumerate(self.table.offsets.tolist()) if offset == place]

    def nbytes(self, expert: int) -> int:
        return sum(chunk.length for chunk in self.chunks[expert])


@pytest.fixture
def rig(disk: Any) -> Iterator[Rig]:
    rig = Rig(disk(2, 4, 3072), [5, 2, 7])
    yield rig
    rig.store.close()
    rig.memory.close()


def test_copies_and_computation_are_launched_in_order(rig):
    rig.launch((2, 0, 1), (5, 2, 0))
    # Behind the copies: a mark for other threads that write to these slots, and a time.
    assert rig.engine.did == ["time", "mark", "time", "compute"]
    assert rig.content(0) == [2, 2.5]
    assert rig.content(2) == [5, 5.5]
    assert rig.expert_in(0) == [2]
    assert rig.expert_in(2) == [5]
    assert rig.slots._marks[0] == rig.slots._marks[2] == rig.slots.last_mark
    rig.launch((7, 2, 2))
    assert rig.content(2) == [7, 7.5]
    assert rig.expert_in(2) == [7]
    assert rig.table.slot_of(5) == -1


def test_the_table_has_an_expert_when_its_copies_were_launched(rig, monkeypatch):
    rig.launch((2, 0, 1))
    seen = []

    def copy(loads: Loads) -> int:
        seen.append((dict(rig.table.changes), rig.table.slot_of(2), rig.table.slot_of(5)))
        return 0

    monkeypatch.setattr(rig.loads, "_copy", copy)
    rig.launch((5, 0, 0))
    assert seen == [({2: ABSENT}, -1, -1)]
    assert rig.expert_in(0) == [5]


def test_a_read_into_host_memory_waits_for_copies_from_there(rig):
    rig.launch((2, 0, 1))
    mark = rig.slots.last_mark
    rig.engine.did.clear()
    rig.read(6, 1)
    assert rig.engine.did == [f"wait for {mark}"]  # once
    rig.read(5, 0)
    assert rig.engine.did == [f"wait for {mark}"]
    rig.launch((6, 1, 1))
    assert rig.content(1) == [6, 6.5]


def test_each_lane_that_reads_into_a_slot_waits_for_copies_from_there(rig, monkeypatch):
    """Lanes read chunks of an expert at the same time."""
    rig.launch((2, 0, 1))
    waits = list[int]()

    def wait(mark: Any) -> None:
        waits.append(len(waits))
        if len(waits) == 1:  # while the first lane waits, the second one begins
            read(1)

    def read(number: int) -> None:
        action = StartChunk(number, 6, -1, number, host_slot=1)
        rig.memory.read_chunk(action, rig.chunks[6][number], rig.store.read, Staging())

    monkeypatch.setattr(rig.engine, "wait", wait)
    read(0)
    assert len(waits) == 2
    read(2)
    assert len(waits) == 2


def test_bytes_that_were_read_again_elsewhere_are_found(rig):
    """A slot's bytes begin where the last read has put them."""
    rig.launch((2, 0, 1))

    def read(chunk: Any, staging: Any) -> Any:  # into memory of its own: copied to the beginning
        return rig.store.read(chunk, Staging())

    for number, chunk in enumerate(rig.chunks[2]):
        action = StartChunk(0, 2, -1, number, host_slot=1)
        rig.memory._place(action)[:] = 0
        rig.memory.read_chunk(action, chunk, read, Staging())
    rig.launch((2, 1, 1))
    assert rig.content(1) == [2, 2.5]


def test_neighbours_are_one_copy_and_others_are_written_as_slots_do(rig, monkeypatch):
    rig.launch((2, 0, 1))
    (plan,) = rig.memory.plans.values()
    assert plan.bounds == ((0, 8192), (8192, 16384), (16384, 24576))
    assert plan.nbytes == 24576

    def nowhere(self: Any, writes: Any) -> None:
        return None

    rig.memory.plans.clear()
    monkeypatch.setattr(DeviceSlots, "plain_ranges", nowhere)
    rig.launch((2, 1, 1))
    assert rig.content(1) == [2, 2.5]


def test_views_of_a_slot_are_kept_until_slots_change(rig):
    rig.launch((2, 0, 1))
    rig.launch((5, 1, 0), (7, 2, 2))
    bounds = {id(plan.bounds) for plan in rig.memory.plans.values()}
    assert len(bounds) == 1  # of equal experts
    (plan, *_) = rig.memory.plans.values()
    views = rig.slots.parts(0, plan.bounds)
    assert rig.slots.parts(0, plan.bounds) is views
    assert [view.numel() for view in rig.slots.parts(0, ((0, 5), (7, 9)))] == [5, 2]
    again = rig.slots.parts(0, plan.bounds)
    assert [each.data_ptr() for each in again] == [each.data_ptr() for each in views]
    rig.slots.trim(rig.slots.capacity)
    assert rig.slots._parts == {}


def test_bytes_of_other_forms_have_no_plain_ranges(rig):
    data = np.zeros(64, np.uint8)
    plain = Copy(0, 0, (1, 8), (32, 4), (32, 4), "float32", "float32")
    second = Copy(32, 40, (1, 8), (32, 4), (32, 4), "float32", "float32")
    cast = Copy(0, 0, (1, 8), (32, 4), (16, 2), "float32", "bfloat16")
    assert [r[1:] for r in rig.slots.plain_ranges([((plain, second), data, 0)])] == [
        (0, 32), (40, 72),
    ]  # fmt: skip
    assert rig.slots.plain_ranges([((plain, cast), data, 0)]) is None


def test_seconds_of_copies_are_said_when_they_are_known(rig):
    rig.engine.times = {0: 1.0}
    rig.launch((2, 0, 1))
    assert [*rig.loads.take_ended()] == []
    rig.launch((5, 1, 0), (7, 2, 2))
    rig.engine.times |= {1: 1.5, 2: 2.0}
    assert [*rig.loads.take_ended()] == [(1, 1, rig.nbytes(2), 0.5)]
    rig.engine.times[3] = 2.25
    assert [*rig.loads.take_ended()] == [(1, 2, 2 * rig.nbytes(2), 0.25)]
    assert [*rig.loads.take_ended()] == []


@pytest.mark.parametrize("at", ["copies", "computation"])
def test_an_interrupt_leaves_slots_that_others_can_write(rig, monkeypatch, at):
    rig.launch((2, 0, 1))
    rig.engine.did.clear()

    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.loads if at == "copies" else rig, {"copies": "_copy"}.get(at, "compute"),
                      interrupt)  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            rig.launch((5, 0, 0))
    assert "mark" in rig.engine.did
    assert rig.slots._marks[0] == rig.slots.last_mark
    rig.table.write_changes()
    assert rig.expert_in(0) == ([] if at == "copies" else [5])  # never 2, whose bytes are gone
    rig.launch((7, 0, 2))
    assert rig.content(0) == [7, 7.5]
    assert rig.expert_in(0) == [7]
