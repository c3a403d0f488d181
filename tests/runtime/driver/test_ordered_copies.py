"""Copies of a step in order: what reads or overwrites a slot comes behind the copies to it.

An engine keeps clocks of streams, so that an order that a GPU would not keep is seen on a CPU.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import StartChunk
from greenroom.errors import ClosedError, DeviceError, StoreError
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.driver import ordered_copies
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.driver.ordered_copies import OrderedCopies
from greenroom.runtime.fakes import FakeStore
from greenroom.runtime.slots.tier import ABSENT
from greenroom.runtime.store.disk import DiskStore
from tests.runtime.cuda.clocks import Clocks
from tests.runtime.rig import Ahead, Rig, in_time

LAYERS, EXPERTS, CHUNK_BYTES = 3, 8, 8192


class WatchedSlots(DeviceSlots):
    """Slots that check the order of copies and of groups that read."""

    engine: Clocks

    def __init__(self, *arguments: Any) -> None:
        self.written: dict[int, list[tuple[str, int]]] = {}  # chunks of the expert that it gets
        self.overwritten: dict[int, list[tuple[str, int]]] = {}  # of the one before
        self.read: dict[int, tuple[str, int]] = {}
        self.in_order = 0  # copies
        super().__init__(*arguments)

    def begin(self, slot: int) -> None:
        """Begin to write another expert."""
        self.overwritten[slot] = self.written.pop(slot, [])

    def _copy(self, slot: int, *arguments: Any) -> None:
        engine = self.engine
        for each in self.overwritten.get(slot, []):
            assert engine.is_behind(each), "the expert before is still written"
        assert engine.is_behind(self.read.get(slot)), "a group still reads the slot"
        operation = engine.operate()
        self.written.setdefault(slot, []).append(operation)
        self.in_order += operation[0].startswith("copies")
        super()._copy(slot, *arguments)

    def compute(self, slots: list[int]) -> None:
        """Read slots, as a group of experts does."""
        for slot in slots:
            for each in self.written.get(slot, []):
                assert self.engine.is_behind(each), "a copy may be under way"
        operation = self.engine.operate()
        self.read |= dict.fromkeys(slots, operation)


class OrderedRig(Rig):
    """A rig with slots on a device, a table of them, and a tier in host memory."""

    slots: Any

    def __init__(self, catalog: Any, capacity: int, tier_slots: int, **options: Any) -> None:
        super().__init__(catalog, capacity, (2, 2), tier_slots=tier_slots, **options)
        predictor, fails = options.get("predictor"), options.get("fails", lambda read: False)
        self.driver.close()
        self.store = FakeStore(DiskStore(catalog, chunk_bytes=CHUNK_BYTES), fails=fails)
        engine, chunks = Clocks(), [self.store.chunks(e) for e in range(catalog.experts)]
        self.engine = engine
        self.slots = WatchedSlots(engine, capacity, catalog.slot_bytes, catalog.experts)
        self.table = SlotTable(engine, self.slots, [len(each) for each in chunks])
        begin = self.table.begin

        def begin_slot(expert: int, slot: int) -> None:
            self.slots.begin(slot)
            begin(expert, slot)

        self.table.begin = begin_slot  # type: ignore[method-assign]
        queue = self.scheduler.transfers.queue
        memory = HostMemory(engine, chunks, queue.staging_slots, tier_slots)
        memory.pin()
        self.driver = Driver(
            self.scheduler, self.store, self.slots, links=("disk -> host", "host -> device"),
            host_memory=memory, slot_table=self.table,
            foresight=None if predictor is None else self.foresight(predictor, catalog),
        )  # fmt: skip

    @staticmethod
    def foresight(predictor: Any, catalog: Any) -> Any:
        from greenroom.core.prefetch.foresight import Foresight

        return Foresight(predictor, catalog.offsets)

    def compute(self, experts: np.ndarray, slots: np.ndarray) -> None:
        self.slots.compute(slots.tolist())
        super().compute(experts, slots)
        self.slots.mark_computed(slots.tolist())

    def look_up(self) -> None:
        """Read all slots that the device's table names, as a look-up's products may."""
        offsets = self.table.offsets.tolist()
        named = [self.table.slot_of(e) for e, at in enumerate(offsets) if at > ABSENT]
        with self.engine.on_stream(self.table.stream):
            self.slots.compute([slot for slot in named if slot >= 0])


def play(rig: OrderedRig, seed: int, faults: bool = False) -> None:
    """Steps of prompts and tokens, some of which are given up, with look-ups in between."""
    rng = random.Random(seed)
    for number in range(30):
        prefill = rng.random() < 0.5
        rig.begin(prefill, tokens=5 if prefill else 1, request=number)
        for layer in range(LAYERS):
            few = EXPERTS if prefill else 2
            chosen = sorted(rng.sample(range(EXPERTS), rng.randint(1, few)))
            leaves = faults and rng.random() < 0.15

            def compute(experts: np.ndarray, slots: np.ndarray, leaves: bool = leaves) -> None:
                rig.compute(experts, slots)
                if leaves:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt, *([StoreError] if faults else [])):
                rig.step(layer, *chosen, compute=compute)
            rig.driver.begin_exclusive()  # a step that was given up ends
            rig.look_up()
        rig.driver.end_pass()


@pytest.mark.parametrize("tier_slots", [4, 24])
@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_slot_is_read_behind_its_copies_and_written_behind_its_readers(
    disk, monkeypatch, tier_slots, ahead, faults, seed
):
    monkeypatch.setattr(ordered_copies, "WINDOW", 3)
    monkeypatch.setattr(ordered_copies, "BATCH_BYTES", 3 * CHUNK_BYTES)
    rng = random.Random(seed)
    predictor = Ahead(lambda layer: rng.sample(range(EXPERTS), 3)) if ahead else None
    options = {"ahead": ahead, "predictor": predictor}
    if faults:
        options["fails"] = lambda read: read % 37 == 0
    rig = OrderedRig(disk(LAYERS, EXPERTS, 3072), 13, tier_slots, **options)
    try:
        in_time(lambda: play(rig, seed, faults))
        rig.settle()
        rig.check()
        assert rig.slots.in_order > 0 or tier_slots < LAYERS * EXPERTS
    finally:
        rig.driver.close()


@pytest.fixture
def rig(disk) -> Iterator[OrderedRig]:
    rig = OrderedRig(disk(LAYERS, EXPERTS, 3072), 8, LAYERS * EXPERTS)
    for layer in range(LAYERS):  # host memory has all
        rig.step(layer, *range(EXPERTS))
    rig.slots.in_order = 0
    yield rig
    rig.driver.close()


def test_experts_in_host_memory_take_no_other_thread(rig, monkeypatch):
    begun: list[StartChunk] = []
    monkeypatch.setattr(rig.driver._copier, "start", begun.append)
    rig.begin(True, tokens=5)
    rig.step(0, *range(EXPERTS))
    assert not begun
    assert rig.slots.in_order == sum(len(rig.store.chunks(e)) for e in range(EXPERTS))
    assert rig.table.count == EXPERTS
    rig.look_up()


def test_a_look_up_on_another_stream_is_behind_copies_that_a_step_has_joined(rig, monkeypatch):
    """The table's stream is another one by then, as after a second thread's token."""
    request = rig.driver._request

    def requested(*arguments: Any, **options: Any) -> None:
        request(*arguments, **options)
        with rig.engine.on_stream("another"):
            rig.driver.changes.follow_stream()

    monkeypatch.setattr(rig.driver, "_request", requested)
    rig.begin(True, tokens=5)
    rig.step(0, *range(EXPERTS))
    assert rig.slots.in_order > 0
    assert rig.table.stream == "another"
    rig.look_up()


def test_slots_are_freed_behind_copies_of_a_step_that_interrupts_have_left(disk):
    rig = OrderedRig(disk(LAYERS, EXPERTS, 3072), 8, LAYERS * EXPERTS)
    rig.step(0, *range(EXPERTS))
    ordered = rig.driver._ordered
    ordered.begin()
    with rig.engine.on_stream(ordered._stream):
        copy, ordered._launched = rig.engine.operate(), 1
    rig.driver.close()
    assert ordered.thread == 0
    with rig.engine.on_stream(rig.table.stream):
        assert rig.engine.is_behind(copy)


def test_nested_experts_are_copied_by_the_lanes(rig, monkeypatch):
    """Planes are joined when the last chunk has arrived, and lanes do not know of copies here."""
    with monkeypatch.context() as nested:
        nested.setattr(WatchedSlots, "joins_planes", True)
        ordered = OrderedCopies(
            rig.store, rig.slots, rig.driver.host_memory, rig.table, rig.scheduler
        )
    monkeypatch.setattr(rig.driver, "_ordered", ordered)
    rig.begin(True, tokens=5)
    rig.step(0, *range(EXPERTS))
    assert rig.slots.in_order == 0
    rig.look_up()


def test_a_step_that_reads_the_table_has_its_copies_by_the_lanes(rig):
    """The table names experts whose copies are under way: a look-up would read them."""
    rig.layer, rig.computed = 0, []

    def compute(experts: np.ndarray, slots: np.ndarray) -> None:
        rig.look_up()
        rig.compute(experts, slots)

    rig.driver.step(0, np.arange(4), compute, by_table=True)
    assert rig.slots.in_order == 0
    assert sorted(rig.computed) == [0, 1, 2, 3]


def test_a_timeline_has_the_times_of_lanes(rig):
    from greenroom.runtime.driver.timeline import Timeline

    rig.driver.timeline = Timeline()
    rig.step(0, *range(EXPERTS))
    assert rig.slots.in_order == 0


def test_a_copy_that_fails_fails_its_step_alone(rig, monkeypatch):
    with monkeypatch.context() as failing:

        def fail(*_: Any) -> None:
            raise DeviceError("the GPU failed")

        failing.setattr(rig.slots, "launch_write", fail)
        with pytest.raises(DeviceError, match="the GPU failed"):
            rig.step(0, *range(EXPERTS))
    rig.settle()
    rig.check()
    rig.step(0, *range(EXPERTS))


@pytest.mark.parametrize("at", ["chunk_source", "mark_read"])
def test_an_interrupt_between_two_copies_loses_none(rig, monkeypatch, at):
    memory, calls = rig.driver.host_memory, []
    original = getattr(memory, at)

    def interrupt(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(memory, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.step(0, *range(EXPERTS))
    in_time(lambda: rig.step(0, *range(EXPERTS)))
    rig.look_up()
    rig.check()


@pytest.mark.parametrize("at", ["land", "_insert_now"])
def test_an_interrupt_within_a_delivery_makes_the_driver_unusable(rig, monkeypatch, at):
    """Delivered again, the chunk would count twice: an expert would seem to be complete."""
    calls, original = [], getattr(rig.table, at)

    def interrupt(*arguments: Any) -> None:
        calls.append(arguments)
        original(*arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(rig.table, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.step(0, *range(EXPERTS))
    for _ in range(2):
        with pytest.raises(ClosedError, match="unusable"):
            rig.step(1, *range(EXPERTS))
    assert len(calls) == 4


@pytest.mark.parametrize("at", ["launch_write", "mark_read"])
def test_no_bytes_are_written_twice_behind_an_interrupt(rig, monkeypatch, at):
    """Slots count the bytes of nested experts, and join their planes when all have come."""
    written, write = list[Any](), rig.slots.launch_write
    place = rig.slots if at == "launch_write" else rig.driver.host_memory
    original = getattr(place, at)

    def writing(slot: int, copies: Any, data: Any, start: int) -> None:
        written.append((slot, start))
        write(slot, copies, data, start)

    def interrupt(*arguments: Any) -> None:
        (writing if at == "launch_write" else original)(*arguments)
        if len(written) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.slots, "launch_write", writing)
        patch.setattr(place, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.step(0, *range(EXPERTS))
        assert len(written) == len({*written}) > 4
    rig.look_up()
    rig.step(1, *range(EXPERTS))
    rig.check()


def test_ctrl_c_waits_for_a_batch_of_copies(rig, monkeypatch, ctrl_c):
    """Else a delivery that it interrupts would make the driver unusable."""
    land, calls = rig.table.land, list[int]()

    def interrupt(*arguments: Any) -> None:
        land(*arguments)
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(rig.table, "land", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.step(0, *range(EXPERTS))
    assert len(calls) > 2
    rig.look_up()
    rig.step(1, *range(EXPERTS))
    rig.check()


def test_interrupts_at_a_step_s_end_and_while_it_is_abandoned_leave_no_open_step(rig, monkeypatch):
    settle, calls = rig.driver._ordered.settle, []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise KeyboardInterrupt
        settle()

    monkeypatch.setattr(rig.driver._ordered, "settle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.step(0, *range(EXPERTS))
    assert len(calls) == 2
    rig.driver.begin_exclusive()  # as before each launch of look-ups
    assert len(calls) == 3
    rig.look_up()
    in_time(lambda: step_by_table(rig, 1, *range(EXPERTS)))


def test_the_thread_waits_when_many_copies_are_under_way(rig, monkeypatch):
    monkeypatch.setattr(ordered_copies, "WINDOW", 2)
    waits: list[Any] = []
    wait = rig.engine.wait
    monkeypatch.setattr(rig.engine, "wait", lambda mark: (waits.append(mark), wait(mark)))
    rig.step(1, *range(EXPERTS))
    assert len(waits) >= rig.slots.in_order - 2
    assert rig.driver.meter.stalls["miss"] > 0


def step_by_table(rig: OrderedRig, layer: int, *experts: int) -> None:
    """A token's step, whose copies the lanes make."""
    rig.layer = layer
    rig.driver.step(layer, np.array(experts), rig.compute, by_table=True)


def test_an_interrupt_at_the_begin_of_a_step_leaves_no_step_behind(rig, monkeypatch):
    """Later copies would not wait for look-ups, as within a step that reads no table."""
    begin_step = rig.table.begin_step

    def interrupt() -> None:
        begin_step()
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(rig.table, "begin_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.step(0, *range(EXPERTS))
    rig.look_up()  # whose products may still run
    in_time(lambda: step_by_table(rig, 1, *range(EXPERTS)))


def test_copies_of_a_chunk_that_failed_end_before_its_slot_is_used_again(rig, monkeypatch):
    launch_write = rig.slots.launch_write

    def fail(*arguments: Any) -> None:
        launch_write(*arguments)
        raise DeviceError("the GPU has no room for a scratch buffer")

    with monkeypatch.context() as failing:
        failing.setattr(rig.slots, "launch_write", fail)
        with pytest.raises(DeviceError, match="no room"):
            rig.step(0, *range(EXPERTS))
    in_time(lambda: step_by_table(rig, 1, *range(EXPERTS)))
