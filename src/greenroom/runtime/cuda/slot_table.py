"""The table on a device that says which slot has an expert's bytes.

Kernels read it with the router's own choice, so the host need not know the choice before they are
launched. An entry changes with the contents of slots, not with what the policy decides: it is
written when the last chunk of an expert has arrived, and removed before a slot is overwritten.

An expert that a copy on that stream brings is in the table of the next look-up, which writes the
changes itself (`changes`).

Changes go to the stream that computes. So a look-up that was launched before sees the table as it
was; and a slot is overwritten only after all work that was launched while the table named it. A
thread that launches on another stream than the thread before it has its stream wait for the old
one, so that launches and changes are in one order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.compiling.steady_call import SteadyCall
from greenroom.core.pieces import Ints
from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine, device_errors
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.slots.tier import ABSENT

UNIT = 64  # bytes, in which offsets of slots are counted
FEW = 4  # changes of a table that are a launch each; more are one launch, behind a copy


class Entries(NamedTuple):
    """The host's mirror of a table, as compiled functions change it.

    slot_of:   [experts] the slot that has an expert's bytes; -1: none
    expert_in: [slots] the expert that a slot has, or had before another slot got it; -1: none
    changes:   [experts, 2] experts and their new offsets, which the device's table does not have
               yet; each expert once
    changed:   [1] how many these are
    """

    slot_of: Ints
    expert_in: Ints
    changes: Ints
    changed: Ints


class SlotTable:
    """The table of all experts' slots on a device, and its mirror on the host.

    Callers that change it hold one lock, or are the only thread.

    lock:    held by a thread that launches a look-up and the kernels behind it; no entry changes
             meanwhile
    offsets: for each expert of the model, on the device: the offset of its slot from slot 0, in
             units of 64 bytes; ABSENT if no slot has all of its bytes
    stream:  the stream on which kernels that read slots are launched
    entries: the mirror; has no changes while nobody holds `lock`, unless an exception has come
             between
    listed_copies: copies of an expert that a kernel's list has room for; 0: no kernel copies
    """

    def __init__(self, engine: Engine, slots: DeviceSlots, chunks: Sequence[int]) -> None:
        """Make the table of empty slots; `chunks` has each expert's number of chunks."""
        self.engine, self._slots, self._chunks = engine, slots, chunks
        self.stream: Any = engine.current_stream()
        self.lock = threading.RLock()
        with torch.inference_mode(False):  # threads of both modes write to it
            self.offsets = torch.full(
                (len(chunks),), ABSENT, dtype=torch.int64, device=engine.device
            )
        self._awaited: dict[int, int] = {}  # chunks that have not arrived, by slot
        experts = len(chunks)
        self.entries = Entries(
            np.full(experts, -1), np.full(slots.reserve, -1), np.zeros((experts, 2), np.int64),
            np.zeros(1, np.int64),
        )  # fmt: skip
        self.listed_copies = 0
        self._in_step = False  # the device's table is written at its end

    def follow_stream(self) -> None:
        """Put changes on the calling thread's stream, behind all work on the one before.

        The caller holds `lock`, and launches work that reads the table next.
        """
        stream = self.engine.current_stream()
        if stream != self.stream:
            self.engine.order(self.stream, stream)
            self.stream = stream

    def slot_of(self, expert: int) -> int:
        """Return the slot that has an expert's bytes; -1 if none has."""
        return int(self.entries.slot_of[expert])

    @property
    def count(self) -> int:
        """Return how many experts are in slots."""
        return int((self.entries.slot_of >= 0).sum())

    @property
    def changes(self) -> dict[int, int]:
        """Return new offsets of experts that the device's table does not have yet."""
        entries = self.entries
        return dict(entries.changes[: entries.changed[0]].tolist())

    def begin(self, expert: int, slot: int) -> None:
        """Remove what a slot contains, before the chunks of an expert are written there."""
        self.clear(slot)
        self._awaited[slot] = self._chunks[expert]

    def land(self, expert: int, slot: int) -> None:
        """Record that a chunk of an expert has arrived in its slot."""
        self._awaited[slot] -= 1
        if not self._awaited[slot]:
            self._insert_now(expert, slot)

    def clear(self, slot: int) -> None:
        """Remove what a slot contains; a later write waits for all launched work that reads it."""
        with self.lock, self.engine.on_stream(self.stream):
            self.vacate((slot,))
            if self._in_step:
                self._slots.mark_older(slot)
                return
            self.write_changes()
            self.mark(slot)

    def begin_step(self) -> None:
        """Begin a step that reads slots without this table: no look-up comes before `end_step`."""
        with self.lock, self.engine.on_stream(self.stream):
            self.write_changes()
            self._slots.begin_step()
        self._in_step = True

    def end_step(self) -> None:
        """Write the changes of a step, whose copies the stream of look-ups waits for."""
        self._in_step = False
        self.write_changes()

    def mark(self, slot: int) -> None:
        """Let later copies from or to a slot wait for all launched work."""
        with self.lock, self.engine.on_stream(self.stream):
            self._slots.mark_computed((slot,))

    def vacate(self, slots: Sequence[int]) -> None:
        """Remove what slots contain, before copies in order with look-ups write there.

        The caller holds `lock`, also for `insert`.
        """
        _vacate(self.entries, np.array(slots, np.int64))
        self.forget_transfers(slots)

    def forget_transfers(self, slots: Sequence[int] | Ints) -> None:
        """Await no chunk for slots any more, as of a transfer that was given up."""
        if self._awaited:
            for slot in slots:
                self._awaited.pop(int(slot), None)

    def insert(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Record that slots have experts' bytes, before the next look-up at the latest."""
        new = np.array((experts, slots), np.int64)
        _insert(self.entries, new[0], new[1], self._slots.addresses)

    def _insert_now(self, expert: int, slot: int) -> None:
        with self.lock:
            self._awaited.pop(slot, None)
            self.insert((expert,), (slot,))
            if not self._in_step:
                self.write_changes()

    def write_changes(self) -> None:
        """Write to the device's table what no look-up has written."""
        if self.entries.changed[0]:
            with self.lock, self.engine.on_stream(self.stream):
                changes = self.changes
                if len(changes) < FEW:
                    for expert, offset in changes.items():
                        self.offsets[expert].fill_(offset)
                else:
                    numbers = torch.tensor([[*changes], [*changes.values()]])
                    experts, offsets = self.engine.copy_to_device(numbers)
                    self.offsets.index_copy_(0, experts, offsets)
                self.entries.changed[0] = 0

    def hand_over(self, numbers: Ints) -> bool:
        """Write the changes to a list that the next look-up reads; see `hand_over` below."""
        return bool(_hand_over(self.entries, numbers))

    def moved(self, source: int, target: int) -> None:
        """Record that a slot's bytes were copied to another one, which was cleared before."""
        expert = int(self.entries.expert_in[source])
        self.clear(source)
        if expert >= 0:
            self._insert_now(expert, target)

    def trim(self, capacity: int) -> None:
        """Remove the contents of all slots from number `capacity` on.

        What is launched later is behind the use of memory that new slots have from torch: copies
        in order with look-ups look at no mark of a slot.
        """
        for slot in np.flatnonzero(self.entries.expert_in[capacity:] >= 0).tolist():
            self.clear(capacity + slot)
        with self.lock, self.engine.on_stream(self.stream):
            # Also of slots without an expert: a copy that was given up may be under way there.
            self._slots.mark_computed(range(capacity, self._slots.capacity))

    def close(self) -> None:
        """Put a mark behind all launched work, before the slots are freed."""
        quietly = contextlib.suppress(DeviceError)  # of a device that is lost
        with self.lock, quietly, device_errors(), self.engine.on_stream(self.stream):
            self._slots.mark_computed(())


@jit(_nrt=False)
def _change(entries: Entries, expert: int, offset: int) -> None:
    """Set an expert's new offset."""
    count = entries.changed[0]
    for place in range(count):
        if entries.changes[place, 0] == expert:
            entries.changes[place, 1] = offset
            return
    entries.changes[count, 0], entries.changes[count, 1] = expert, offset
    entries.changed[0] = count + 1


@jit(_nrt=False)
def vacate(entries: Entries, slots: Ints) -> None:
    """Remove what slots contain."""
    for slot in slots:
        expert = entries.expert_in[slot]
        if expert >= 0:
            if entries.slot_of[expert] == slot:
                entries.slot_of[expert] = -1
                _change(entries, expert, ABSENT)
            entries.expert_in[slot] = -1


@jit(_nrt=False)
def insert(entries: Entries, experts: Ints, slots: Ints, addresses: Ints) -> None:
    """Record that slots have experts' bytes; `addresses` are those of all slots."""
    for i in range(experts.size):
        entries.expert_in[slots[i]], entries.slot_of[experts[i]] = experts[i], slots[i]
        _change(entries, experts[i], (addresses[slots[i]] - addresses[0]) // UNIT)


@jit(_nrt=False)
def hand_over(entries: Entries, numbers: Ints) -> bool:
    """Write the changes to a list that a look-up reads.

    numbers: [2 n]; receives pairs, then -1 in place of experts

    Returns False, and writes nothing, if there is no room.
    """
    end = 2 * entries.changed[0]
    if end > numbers.size:
        return False
    for place in range(entries.changed[0]):
        numbers[2 * place] = entries.changes[place, 0]
        numbers[2 * place + 1] = entries.changes[place, 1]
    for unused in range(end, numbers.size, 2):
        numbers[unused] = -1
    return True


_vacate, _insert, _hand_over = map(SteadyCall, (vacate, insert, hand_over))
