"""Copies from host memory that the thread that computes launches, in order with the computation."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import Move, StartChunk
from greenroom.core.layout import Copy
from greenroom.core.scheduler.resident_steps import Loads
from greenroom.runtime.cuda.copy_trial import TRIES, WARM_UP, CopyTrial
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.host_loads import HostLoads
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.driver.slot_changes import SlotChanges
from greenroom.runtime.slots.tier import ABSENT
from greenroom.runtime.store.disk import DiskStore, Staging

CHUNK_BYTES, SLOTS = 8192, 3


class Device(Engine):
    """A device that says what was launched, and when its events pass.

    times: of the events of `mark_time` that have passed, by their number
    """

    def __init__(self, kernels_read_host: bool) -> None:
        self.kernels_read_host = kernels_read_host
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


class Copies:
    """A list of copies, whose launch does what the kernel does."""

    def __init__(self, engine: Device, size: int) -> None:
        self._engine, self.numbers = engine, np.zeros(size, np.int64)

    def start(self) -> None:
        self._engine.did.append("copy")
        for source, target, size in self.numbers[1:].reshape(-1, 3)[: self.numbers[0]].tolist():
            ctypes.memmove(target, source, 8 * size)


class Rig:
    """Host memory with some experts of a file, slots of a device, and their table.

    It is also what launches copies and computation.
    """

    def __init__(self, catalog: Any, in_host: Sequence[int], by_kernel: bool) -> None:
        self.engine = Device(by_kernel)
        self.store = DiskStore(catalog, chunk_bytes=CHUNK_BYTES)
        self.chunks = [self.store.chunks(e) for e in range(catalog.experts)]
        self.memory = HostMemory(self.engine, self.chunks, 2, len(in_host))
        self.memory.pin()
        self.slots = DeviceSlots(self.engine, SLOTS, catalog.slot_bytes, SLOTS)
        self.table = SlotTable(self.engine, self.slots, [len(each) for each in self.chunks])
        self.loads = HostLoads(self.store.chunks, self.slots, self.memory, self.table)
        self.loads._trial._kernel_is_best = True  # where a kernel can copy
        listed = 1 + 3 * SLOTS * self.table.listed_copies
        self.copies = Copies(self.engine, listed) if listed > 1 else None
        self.changes = np.zeros(4 * SLOTS, np.int64)
        self.on_device = contextlib.nullcontext()
        for slot, expert in enumerate(in_host):
            self.read(expert, slot)
        self.engine.did.clear()

    def read(self, expert: int, host_slot: int) -> None:
        """Read an expert from disk into a slot of host memory."""
        for number, chunk in enumerate(self.chunks[expert]):
            action = StartChunk(0, expert, -1, number, host_slot=host_slot)
            self.memory.read_chunk(action, chunk, self.store.read, Staging())

    def launch(self, *loads: tuple[int, int, int]) -> None:
        self.loads.launch(1, Loads(np.array(loads, np.int64).reshape(-1, 3).T.copy()), self)

    def follow_stream(self) -> None:
        self.table.follow_stream()

    def compute_loaded(self, handed_over: bool = False) -> None:
        self.engine.did.append("compute")
        if not handed_over:
            assert self.table.hand_over(self.changes)
        for expert, offset in self.changes.reshape(-1, 2).tolist():  # as the look-up does
            if expert >= 0:
                self.table.offsets[expert] = offset
        self.table.entries.changed[0] = 0

    def content(self, slot: int) -> list[float]:
        values = self.slots.bytes(slot).numpy().view(np.float32)
        return np.unique(values).tolist()

    def expert_in(self, slot: int) -> list[int]:
        place = (self.slots.address(slot) - self.slots.address(0)) // 64
        return [n for n, offset in enumerate(self.table.offsets.tolist()) if offset == place]

    def nbytes(self, expert: int) -> int:
        return sum(chunk.length for chunk in self.chunks[expert])


@pytest.fixture(params=["kernel", "copies"])
def rig(disk: Any, request: Any) -> Iterator[Rig]:
    rig = Rig(disk(2, 4, 3072), [5, 2, 7], request.param == "kernel")
    assert (rig.copies is not None) == (request.param == "kernel")
    yield rig
    rig.store.close()
    rig.memory.close()


def test_copies_and_computation_are_launched_in_order(rig):
    rig.launch((2, 0, 1), (5, 2, 0))
    assert [each for each in rig.engine.did if each != "copy"] == ["time", "time", "compute"]
    assert rig.engine.did.index("time") < rig.engine.did.index("compute")
    if rig.copies is not None:
        assert rig.engine.did == ["time", "copy", "time", "compute"]
    assert rig.content(0) == [2, 2.5]
    assert rig.content(2) == [5, 5.5]
    assert rig.expert_in(0) == [2]
    assert rig.expert_in(2) == [5]
    rig.launch((7, 2, 2))
    assert rig.content(2) == [7, 7.5]
    assert rig.expert_in(2) == [7]
    assert rig.table.slot_of(5) == -1


def test_a_step_without_loads_is_computed(rig):
    rig.launch()
    assert rig.engine.did == ["compute"]


def test_the_table_has_an_expert_when_its_copies_were_launched(rig, monkeypatch):
    rig.launch((2, 0, 1))
    seen = []

    def compute(handed_over: bool) -> None:
        seen.append((dict(rig.table.changes), rig.table.slot_of(2), rig.table.slot_of(5)))

    there = (rig.slots.address(0) - rig.slots.address(0)) // 64
    monkeypatch.setattr(rig, "compute_loaded", compute)
    rig.launch((5, 0, 0))
    assert seen == [({2: ABSENT, 5: there}, -1, 0)]


def test_a_slot_that_awaits_a_chunk_awaits_none_after_a_load(rig):
    """The transfer was given up, and the slot went to another expert."""
    rig.table.begin(6, 0)
    rig.launch((2, 0, 1))
    assert rig.table._awaited == {}
    assert rig.expert_in(0) == [2]


def test_a_write_to_a_slot_waits_for_copies_to_it(rig):
    rig.launch((2, 0, 1))
    rig.engine.did.clear()
    rig.table.begin(7, 0)  # as of each first chunk of a transfer
    assert rig.engine.did == ["mark"]
    assert rig.slots._marks[0] == rig.slots.last_mark


def test_a_move_waits_for_copies_to_its_source(rig):
    rig.launch((2, 0, 1))
    rig.engine.did.clear()
    pieces: Any = None
    SlotChanges(rig.slots, pieces, rig.table).move(Move(2, 0, 1))
    waits = [each for each in rig.engine.did if each != "mark"]
    assert waits[:2] == ["wait for mark 3", "copy after mark 2"]  # the latest one
    assert rig.content(1) == [2, 2.5]
    assert rig.expert_in(1) == [2]


def test_a_read_into_host_memory_waits_for_copies_from_there(rig):
    rig.launch((2, 0, 1))
    end = 1  # the time behind the copies
    rig.engine.did.clear()
    rig.read(6, 1)
    waits = [f"wait for {end}"] * len(rig.chunks[6])
    assert rig.engine.did == waits
    rig.read(5, 0)
    assert rig.engine.did == waits
    rig.engine.times |= {0: 0.0, end: 1.0}
    assert [*rig.loads.take_ended()]  # they have ended: no read waits for them
    rig.read(6, 1)
    assert rig.engine.did == waits
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


def test_a_read_forgets_no_copies_that_were_launched_while_it_waited(rig, monkeypatch):
    """Another lane has read another chunk of the expert, which is on its way to the device."""
    rig.memory.mark_read((1,), "mark of the expert before")
    waits = list[Any]()

    def wait(mark: Any) -> None:
        waits.append(mark)
        if len(waits) == 1:
            rig.memory.mark_read((1,), "mark of the other chunk")

    def read(expert: int) -> None:
        action = StartChunk(0, expert, -1, 0, host_slot=1)
        rig.memory.read_chunk(action, rig.chunks[expert][0], rig.store.read, Staging())

    monkeypatch.setattr(rig.engine, "wait", wait)
    read(6)
    read(3)
    assert waits == ["mark of the expert before", "mark of the other chunk"]


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
    plan = rig.memory.plans.get(1)
    assert plan.bounds == ((0, 8192), (8192, 16384), (16384, 24576))
    assert plan.nbytes == 24576

    def nowhere(self: Any, writes: Any) -> None:
        return None

    rig.memory.plans.forget(1)
    monkeypatch.setattr(DeviceSlots, "plain_ranges", nowhere)
    rig.engine.did.clear()
    rig.launch((2, 1, 1))
    assert "copy" not in rig.engine.did
    assert rig.content(1) == [2, 2.5]
    assert rig.expert_in(1) == [2]


def test_views_of_a_slot_are_kept_until_slots_change(rig):
    rig.launch((2, 0, 1))
    rig.launch((5, 1, 0), (7, 2, 2))
    plans = [rig.memory.plans.get(slot) for slot in range(3)]
    assert len({id(plan.bounds) for plan in plans}) == 1  # of equal experts
    plan = plans[0]
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
        if at == "computation":
            patch.setattr(rig, "compute_loaded", interrupt)
        elif rig.copies is None:
            patch.setattr(rig.loads, "_copy_each", interrupt)
        else:
            patch.setattr(rig.copies, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.launch((5, 0, 0))
    assert ("mark" in rig.engine.did) == (at == "copies")  # some may be on their way
    assert (rig.slots._marks[0] == "mark 2") == (at == "copies")
    rig.engine.did.clear()
    rig.read(3, 0)
    assert {*rig.engine.did} == {"wait for mark 2" if at == "copies" else "wait for 3"}
    rig.table.write_changes()
    assert rig.expert_in(0) == ([] if at == "copies" else [5])  # never 2, whose bytes are gone
    rig.launch((7, 0, 2))
    assert rig.content(0) == [7, 7.5]
    assert rig.expert_in(0) == [7]


def test_a_second_interrupt_leaves_no_expert_without_its_bytes(rig, monkeypatch):
    rig.launch((2, 0, 1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.copies or rig.loads, "start" if rig.copies else "_copy_each", interrupt)
        patch.setattr(rig.slots, "mark_computed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.launch((5, 0, 0))
    rig.table.write_changes()
    assert rig.expert_in(0) == []
    assert rig.table.slot_of(5) == -1


def test_changes_that_an_interrupt_has_left_are_written_before_copies(rig):
    """Else a list of changes could have an expert twice."""
    rig.launch((2, 0, 1))
    rig.table.insert([4], [1])
    rig.launch((5, 0, 0))
    assert rig.expert_in(1) == [4]
    assert rig.expert_in(0) == [5]


def test_the_faster_way_to_copy_is_kept(rig):
    """Both are tried in turn; without a kernel there is nothing to try."""
    rig.loads._trial = CopyTrial()
    steps = 2 * (WARM_UP + TRIES)
    rig.engine.times = {n: n // 2 * 9.0 + n % 2 for n in range(2 * steps)}  # a second each
    for step in range(steps):
        rig.engine.times[2 * step + 1] += step % 2 == 0  # a kernel is slower
        rig.launch((2, 0, 1))
    assert rig.engine.did.count("copy") == (steps // 2 if rig.copies is not None else 0)
    assert [*rig.loads.take_ended()]
    rig.engine.did.clear()
    rig.launch((2, 0, 1))
    assert "copy" not in rig.engine.did


def test_memory_that_is_not_registered_is_read_by_no_kernel(rig):
    assert rig.memory.kernels_can_read == rig.engine.kernels_read_host
    rig.memory._registration.nbytes -= 4096  # the last piece was refused, or `pin` not called
    assert not rig.memory.kernels_can_read
    rig.launch((2, 0, 1))
    assert "copy" not in rig.engine.did
    assert rig.content(0) == [2, 2.5]
