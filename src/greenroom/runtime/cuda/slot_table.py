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
from typing import Any

import torch

from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine, device_errors
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.slots.tier import ABSENT

UNIT = 64  # bytes, in which offsets of slots are counted


class SlotTable:
    """The table of all experts' slots on a device, and its mirror on the host.

    Callers that change it hold one lock, or are the only thread.

    lock:    held by a thread that launches a look-up and the kernels behind it; no entry changes
             meanwhile
    offsets: for each expert of the model, on the device: the offset of its slot from slot 0, in
             units of 64 bytes; ABSENT if no slot has all of its bytes
    stream:  the stream on which kernels that read slots are launched
    changes: new entries of experts that the device's table does not have yet; empty while nobody
             holds `lock`, unless an exception has come between
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
        self._slot_of = [-1] * len(chunks)
        self._expert_in: dict[int, int] = {}  # complete experts, by slot
        self._awaited: dict[int, int] = {}  # chunks that have not arrived, by slot
        self._offsets: dict[int, int] = {}  # of slots that were in use
        self.changes: dict[int, int] = {}

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
        return self._slot_of[expert]

    @property
    def count(self) -> int:
        """Return how many experts are in slots."""
        return len(self._slot_of) - self._slot_of.count(-1)

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
        """Remove what a slot contains; a later write to the slot waits for all launched work."""
        with self.lock, self.engine.on_stream(self.stream):
            self.vacate((slot,))
            self.write_changes()
            self._slots.mark_computed((slot,))

    def vacate(self, slots: Sequence[int]) -> None:
        """Remove what slots contain, before copies in order with look-ups write there.

        The caller holds `lock`, also for `insert`.
        """
        for slot in slots:
            expert = self._expert_in.get(slot, -1)
            if expert >= 0 and self._slot_of[expert] == slot:
                self.changes[expert] = ABSENT  # first: an interrupt must not lose it
                self._slot_of[expert] = -1
            self._expert_in.pop(slot, None)
            self._awaited.pop(slot, None)

    def insert(self, expert: int, slot: int) -> None:
        """Record that a slot has an expert's bytes, before the next look-up at the latest."""
        offset = self._offsets.get(slot)
        if offset is None:
            offset = (self._slots.address(slot) - self._slots.address(0)) // UNIT
            self._offsets[slot] = offset
        self._expert_in[slot], self._slot_of[expert] = expert, slot
        self.changes[expert] = offset

    def _insert_now(self, expert: int, slot: int) -> None:
        with self.lock:
            self._awaited.pop(slot, None)
            self.insert(expert, slot)
            self.write_changes()

    def write_changes(self) -> None:
        """Write to the device's table what no look-up has written."""
        if self.changes:
            with self.lock, self.engine.on_stream(self.stream):
                for expert, offset in self.changes.items():
                    self.offsets[expert].fill_(offset)
                self.changes.clear()

    def moved(self, source: int, target: int) -> None:
        """Record that a slot's bytes were copied to another one, which was cleared before."""
        expert = self._expert_in.get(source, -1)
        self.clear(source)
        if expert >= 0:
            self._insert_now(expert, target)

    def trim(self, capacity: int) -> None:
        """Remove the contents of all slots from number `capacity` on."""
        for slot in [slot for slot in self._expert_in if slot >= capacity]:
            self.clear(slot)
        self._offsets.clear()  # slots that are added later have other addresses

    def close(self) -> None:
        """Put a mark behind all launched work, before the slots are freed."""
        quietly = contextlib.suppress(DeviceError)  # of a device that is lost
        with self.lock, quietly, device_errors(), self.engine.on_stream(self.stream):
            self._slots.mark_computed(())
