"""The transfer queue: which chunk of which piece a link carries next.

Demand goes before prefetch; within each, first come first served. There is one entry a piece;
upgrading a prefetch to a demand keeps the chunks that were moved. What a link has begun it ends,
so a new demand waits for at most one chunk a lane.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum


class Urgency(IntEnum):
    DEMAND = 0
    PREFETCH = 1


@dataclass(slots=True)
class Entry:
    """A piece on its way: `started` chunks were given to a lane, `landed` of them have arrived."""

    piece: int
    slot: int
    chunks: int
    urgency: Urgency
    started: int = 0
    landed: int = 0
    failed: bool = False

    @property
    def complete(self) -> bool:
        return self.landed == self.chunks

    @property
    def arrived(self) -> bool:
        return self.complete and not self.failed

    @property
    def moving(self) -> int:
        """Chunks that a lane is carrying now."""
        return self.started - self.landed


class TransferQueue:
    """Entries by piece. Those with chunks left to start wait in one line an urgency."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._lines: dict[Urgency, OrderedDict[int, Entry]] = {u: OrderedDict() for u in Urgency}

    def __contains__(self, piece: int) -> bool:
        return piece in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, piece: int, slot: int, chunks: int, urgency: Urgency = Urgency.DEMAND) -> Entry:
        """Ask for a piece. One that is on its way keeps its entry, upgraded if this is a demand."""
        entry = self.entries.get(piece)
        if entry is None:
            entry = self.entries[piece] = Entry(piece, slot, chunks, urgency)
            self._lines[urgency][piece] = entry
        elif urgency < entry.urgency:
            if self._lines[entry.urgency].pop(piece, None) is not None:
                self._lines[urgency][piece] = entry
            entry.urgency = urgency
        return entry

    def start(self) -> tuple[Entry, int] | None:
        """The next (entry, chunk number) to move, or None where nothing waits."""
        for line in self._lines.values():
            if line:
                entry = next(iter(line.values()))
                chunk = entry.started
                entry.started += 1
                if entry.started == entry.chunks:
                    del line[entry.piece]
                return entry, chunk
        return None

    def land(self, piece: int, ok: bool = True) -> Entry:
        """A chunk has arrived, or failed to; the entry leaves the queue with its last one."""
        entry = self.entries[piece]
        entry.landed += 1
        entry.failed |= not ok
        if entry.complete:
            del self.entries[piece]
        return entry

    def drop(self, piece: int) -> bool:
        """Start no more chunks of a piece. True where nothing of it is moving: its slot is free.

        Where a chunk is still moving the entry stays until it has landed and `forget` is called.
        """
        entry = self.entries[piece]
        self._lines[entry.urgency].pop(piece, None)
        if entry.moving:
            return False
        del self.entries[piece]
        return True

    def forget(self, piece: int) -> None:
        """Remove what is left of a dropped entry."""
        self.entries.pop(piece, None)
