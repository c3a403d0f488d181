"""The device's table of slots follows what slots contain."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slot_table import Entries, SlotTable, hand_over, insert, vacate
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.slots.tier import ABSENT
from tests.runtime.cuda.clocks import Clocks

STRIDE = 128


class Streams(Engine):
    """An engine whose marks and changes name the stream that they are on."""

    def __init__(self) -> None:
        self.on: list[Any] = ["another thread's"]
        self.orders: list[tuple[Any, Any]] = []

    def current_stream(self) -> Any:
        return self.on[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.on.append(stream)
        yield
        self.on.pop()

    def mark(self) -> Any:
        return f"mark on {self.on[-1]}"

    def order(self, before: Any, after: Any) -> None:
        self.orders.append((before, after))


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> DeviceSlots:
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 1)
    return DeviceSlots(Streams(), 4, STRIDE, 4)


@pytest.fixture
def table(slots: DeviceSlots) -> SlotTable:
    table = SlotTable(slots.engine, slots, [1, 2, 1, 1])
    table.stream = "computes"
    return table


def offsets(table: SlotTable, slots: DeviceSlots) -> list[int]:
    """The slot of each expert, by its offset on the device."""
    places = {(slots.address(n) - slots.address(0)) // 64: n for n in range(slots.capacity)}
    found = [-1 if each == ABSENT else places[each] for each in table.offsets.tolist()]
    assert found == [table.slot_of(expert) for expert in range(4)]
    assert table.count == 4 - found.count(-1)
    return found


def test_an_expert_has_its_slot_when_its_last_chunk_is_there(table, slots):
    table.begin(1, 2)
    table.land(1, 2)
    assert offsets(table, slots) == [-1, -1, -1, -1]
    table.land(1, 2)
    assert offsets(table, slots) == [-1, 2, -1, -1]


def test_a_slot_that_is_overwritten_is_nobody_s_and_its_write_waits(table, slots):
    table.begin(0, 3)
    table.land(0, 3)
    slots._marks.clear()
    table.begin(1, 3)
    assert offsets(table, slots) == [-1, -1, -1, -1]
    assert slots._marks == {3: "mark on computes"}  # behind every look-up that saw the slot
    table.land(1, 3)
    table.begin(1, 3)  # the transfer failed, and begins again
    table.land(1, 3)
    assert offsets(table, slots) == [-1, -1, -1, -1]
    table.land(1, 3)
    assert offsets(table, slots) == [-1, 3, -1, -1]


def test_an_expert_that_is_in_two_slots_keeps_the_later_one(table, slots):
    for slot in (0, 1):
        table.begin(2, slot)
        table.land(2, slot)
    assert offsets(table, slots) == [-1, -1, 1, -1]
    table.begin(3, 0)
    assert offsets(table, slots) == [-1, -1, 1, -1]


def test_moves_and_fewer_slots_are_followed(table, slots):
    for expert, slot in ((0, 3), (2, 1), (3, 2)):
        table.begin(expert, slot)
        table.land(expert, slot)
    table.clear(0)
    table.moved(3, 0)
    assert offsets(table, slots) == [0, -1, 1, 2]
    table.trim(2)
    assert offsets(table, slots) == [0, -1, 1, -1]
    assert slots._marks[2] == "mark on computes"


@contextlib.contextmanager
def interrupt(function: Any, line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before a line of a function, by its number among those that run."""
    left, before = [line], sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", range(3))
def test_an_interrupt_leaves_no_entry_of_a_slot_with_other_bytes(table, slots, line):
    table.begin(0, 3)
    table.land(0, 3)
    with (
        pytest.raises(KeyboardInterrupt) if line < 2 else contextlib.nullcontext(),
        interrupt(SlotTable.vacate, line),
    ):
        table.vacate([3])
    table.vacate([3])  # of the next expert that gets the slot
    table.write_changes()
    assert offsets(table, slots) == [-1, -1, -1, -1]


def test_changes_wait_for_a_look_up_or_are_written(table, slots):
    table.begin(0, 3)
    table.land(0, 3)
    table.begin(1, 2)  # a transfer that was given up
    slots._marks.clear()
    with table.lock:
        table.vacate([3, 2])
        assert table.changes == {0: ABSENT}
        table.insert([2], [3])
        there = (slots.address(3) - slots.address(0)) // 64
        assert table.changes == {0: ABSENT, 2: there}
        assert table.slot_of(0) == -1
        assert table.slot_of(2) == 3
        assert table.offsets.tolist() == [there, ABSENT, ABSENT, ABSENT]  # as it was
    assert slots._marks == {}
    table.begin(3, 1)  # another change writes all of them, in their order
    assert table.changes == {}
    assert offsets(table, slots) == [-1, -1, 3, -1]
    table.vacate([3])
    table.write_changes()
    assert offsets(table, slots) == [-1, -1, -1, -1]


def test_slots_that_are_added_again_have_new_addresses(table, slots):
    table.begin(0, 3)
    table.land(0, 3)
    table.trim(2)
    slots.trim(2)
    keep = [slots.engine.empty(STRIDE) for _ in range(99)]  # where the old ones were
    slots.trim(4)
    table.begin(1, 3)
    table.land(1, 3)
    table.land(1, 3)
    assert offsets(table, slots) == [-1, 3, -1, -1]
    del keep


def test_a_stream_that_follows_another_waits_for_it(table, slots):
    engine = slots.engine
    table.follow_stream()
    assert engine.orders == [("computes", "another thread's")]
    table.follow_stream()
    assert len(engine.orders) == 1
    table.begin(0, 3)
    assert slots._marks[3] == "mark on another thread's"


def test_no_entry_changes_while_kernels_are_launched(table):
    """Else a slot could be overwritten between a look-up and the product that reads the slot."""
    table.begin(0, 3)
    table.land(0, 3)
    changes = threading.Thread(target=table.begin, args=(1, 3))
    with table.lock:
        changes.start()
        changes.join(0.05)
        assert table.offsets[0] != ABSENT
        assert changes.is_alive()
    changes.join(30)
    assert table.offsets[0] == ABSENT


def test_slots_are_freed_behind_all_launches(table, slots):
    table.stream = "launches"
    table.close()
    assert slots.last_mark == "mark on launches"


def test_launches_are_behind_what_the_memory_of_new_slots_was_used_for():
    """Torch gives memory that Python has freed, though a kernel of that stream still uses it."""
    engine = Clocks()
    with engine.on_stream("own"):
        slots = DeviceSlots(engine, 2, STRIDE, 4)
        table = SlotTable(engine, slots, [1, 1, 1, 1])
    before = engine.operate()  # of another thread, whose stream allocates
    slots.grow(4)
    table.trim(4)
    slots.trim(4)
    with engine.on_stream("own"):
        assert engine.is_behind(before)


def test_memory_is_freed_behind_a_copy_that_was_given_up(monkeypatch):
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 1)
    engine, freed = Clocks(), list[bool]()
    slots = DeviceSlots(engine, 4, STRIDE, 4)
    table = SlotTable(engine, slots, [1, 1, 1, 1])
    table.begin(0, 3)
    with engine.on_stream("copies"):
        copy = engine.operate()
    engine.order("copies", table.stream)  # at the step's end, when the expert is in no slot

    def free(memory: Any) -> None:
        with engine.on_stream("another one, which allocates"):
            freed.append(engine.is_behind(copy))

    monkeypatch.setattr(engine, "free", free)
    table.trim(3)
    slots.trim(3)
    assert freed == [True]


def entries_of(*changes: tuple[int, int]) -> Entries:
    rest = [(0, 0)] * (6 - len(changes))
    return Entries(
        np.full(6, -1), np.full(4, -1), np.array([*changes, *rest]), np.array([len(changes)])
    )


def test_an_expert_s_newest_offset_is_handed_over_once():
    """Lanes of a kernel write the changes in any order."""
    entries, addresses = entries_of(), np.array([640, 0, 64, 128])
    insert(entries, np.array([5, 2]), np.array([1, 3]), addresses)
    vacate(entries, np.array([3]))
    insert(entries, np.array([2]), np.array([2]), addresses)
    numbers = np.full(8, 99)
    assert hand_over(entries, numbers)
    assert numbers.tolist() == [5, -10, 2, -9, -1, 99, -1, 99]
    assert entries.slot_of.tolist() == [-1, -1, 2, -1, -1, 1]
    assert entries.expert_in.tolist() == [-1, 5, 2, -1]


def test_changes_without_room_are_not_handed_over():
    numbers = np.full(4, 99)
    assert not hand_over(entries_of((0, 1), (1, 2), (2, 3)), numbers)
    assert numbers.tolist() == [99] * 4
    assert hand_over(entries_of((0, 1), (1, 2)), numbers)
    assert numbers.tolist() == [0, 1, 1, 2]
