"""Changes of what slots contain, as the scheduler orders them."""

from __future__ import annotations

from greenroom.core.events import Move, StartChunk, Trim
from greenroom.core.pieces import Pieces
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.slots.tier import Tier


class SlotChanges:
    """Changes of what slots contain: chunks that begin and arrive, moves, fewer slots.

    They are recorded in the device's `table` of slots, if there is one. The driver's lock is held.
    """

    def __init__(self, slots: Tier, pieces: Pieces, table: SlotTable | None) -> None:
        self._slots, self._pieces, self.table = slots, pieces, table

    def follow_stream(self) -> None:
        """Have the calling thread's stream wait for copies that another stream makes in order.

        The caller has the lock of steps: the stream before has all launches that read slots.
        """
        if self.table is not None:
            with self.table.lock:
                self.table.follow_stream()

    def begin(self, action: StartChunk) -> None:
        """Prepare a slot for a chunk: clear it before the first one, fill it from a copy."""
        if action.first_of_piece and action.slot >= 0:
            pool, number = self._slots.at(action.slot)
            pool.clear(number)
            if self.table is not None:
                self.table.begin(action.piece, action.slot)
        if action.copy_slot >= 0:
            pool, number = self._slots.at(action.slot)
            source, copy = self._slots.at(action.copy_slot)
            layer = int(self._pieces.layer[action.piece])
            pool.fill(number, source.bytes(copy), layer)

    def land(self, action: StartChunk, last_link: int) -> None:
        """Record that a chunk has crossed the last link to its slot."""
        if self.table is not None and action.link == last_link and action.slot >= 0:
            self.table.land(action.piece, action.slot)

    def move(self, action: Move) -> None:
        """Copy an expert to another slot."""
        if self.table is not None:
            self.table.clear(action.target)
            self.table.mark(action.source)  # the expert may still be on its way there
        (pool, number), (_, target) = map(self._slots.at, (action.source, action.target))
        pool.move(number, target)
        if self.table is not None:
            self.table.moved(action.source, action.target)

    def trim(self, action: Trim) -> None:
        """Free the slots from a number on."""
        if self.table is not None:
            self.table.trim(action.capacity)
        self._slots.trim(action.capacity)
