"""The transfer queue: which chunk of which piece a link carries next.

Pieces come over one link (disk to slots) or a chain of them (disk to host to device); every link
has lanes, and a line of what it may carry. Demand goes before prefetch; within each, first come
first served. There is one entry a piece; upgrading a prefetch to a demand keeps the chunks that
were moved. What a lane has begun it ends, so a new demand waits for at most one chunk a lane.

In a chain a chunk sits in a staging slot, from the start of its first transfer to the end of its
last. Staging slots are few; prefetches leave one for every lane, so that a demand never waits for a
staging slot that a prefetch holds. Where a tier between two links holds pieces (`tiers`), a piece
goes by its slot there instead, and a piece that the tier already has crosses the last link alone.

Where there are several devices, each has a last link of its own, and what leads there is shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from greenroom.core.events import StartChunk
from greenroom.core.home_devices import spread
from greenroom.core.transfers.tiers import HostTier


class Urgency(IntEnum):
    DEMAND = 0
    PREFETCH = 1


@dataclass(slots=True)
class Entry:
    """A piece on its way: `started` chunks were given to the first link, `landed` are in the slot.

    `path` are the links that lead to its device; `staged[h]` are the (chunk, staging slot) that
    wait for the h-th of them; `moving` chunks are on some lane now.
    `dropped`: no more of it starts. `upgraded`: it was a prefetch when it began.
    `host_slot` is its slot in the middle tier (-1: it has none), `read` chunks have arrived there;
    `host_resident`: all of it was there from the start; `host_only`: it goes no further than that.
    `finished`: its last chunk has landed, or it was given up and nothing of it moves.
    """

    piece: int
    slot: int
    chunks: int
    urgency: Urgency
    path: tuple[int, ...] = (0,)
    staged: list[deque[tuple[int, int]]] = field(default_factory=list)
    started: int = 0
    landed: int = 0
    moving: int = 0
    dropped: bool = False
    failed: bool = False
    upgraded: bool = False
    host_slot: int = -1
    read: int = 0
    host_resident: bool = False
    host_only: bool = False
    finished: bool = False

    @property
    def arrived(self) -> bool:
        return self.landed == self.chunks and not self.failed


class TransferQueue:
    """Entries by piece; those with chunks to start wait in one line a link and urgency."""

    def __init__(
        self,
        lanes: Sequence[int] = (2,),
        staging_slots: int | None = None,
        host: HostTier | None = None,
        devices: int = 1,
    ) -> None:
        """`lanes[h]` transfers at a time on the h-th link of a chain, whose last one there is for
        each device; `staging_slots` hold chunks in a chain; `host` is the tier between two."""
        if host is not None and len(lanes) != 2:
            raise ValueError(f"a middle tier is between two links, not {len(lanes)}")
        self.host, before = host, len(lanes) - 1
        self.paths = [(*range(before), before + device) for device in range(devices)]
        chained, self.lanes = before > 0, spread(lanes, devices)
        # The links whose pace says what a transfer takes: the first, unless nothing needs it.
        first = 1 if host is not None and host.holds_all else 0
        self.paced = {path[first] for path in self.paths}
        self.entries: dict[int, Entry] = {}
        self.demands = 0  # entries that are demands
        self.moving = 0  # chunks on lanes of the links that set the pace now
        # What waits for each link, by urgency, in order.
        self._lines: list[tuple[dict[int, Entry], dict[int, Entry]]] = [
            ({}, {}) for _ in self.lanes
        ]
        self._last_first = tuple(range(len(self.lanes)))[::-1]
        self._idle = [list(range(n))[::-1] for n in self.lanes]
        self._carried: dict[tuple[int, int], tuple[Entry, StartChunk]] = {}
        self.staging_slots = (
            count_staging_slots(self.lanes) if staging_slots is None else staging_slots
        )
        if chained and self.staging_slots <= lanes[0]:
            raise ValueError(
                f"{lanes[0]} lanes need more than {lanes[0]} staging slots: {self.staging_slots}"
            )
        self._free_staging = list(range(self.staging_slots))[::-1] if chained else None

    def add(
        self,
        piece: int,
        slot: int,
        chunks: int,
        urgency: Urgency = Urgency.DEMAND,
        device: int = 0,
    ) -> Entry:
        """Ask for a piece. One that is on its way keeps its entry, upgraded if this is a demand."""
        if piece not in self.entries:
            path = self.paths[device]
            staged = [deque[tuple[int, int]]() for _ in path] if len(path) > 1 else []
            entry = self.entries[piece] = Entry(piece, slot, chunks, urgency, path, staged)
            if self.host is not None:
                entry.host_slot, entry.host_resident = self.host.ask(piece)
            if entry.host_resident:
                entry.started = entry.read = chunks
                staged[1].extend((chunk, -1) for chunk in range(chunks))
            self._lines[path[int(entry.host_resident)]][urgency][piece] = entry
            self.demands += urgency is Urgency.DEMAND
            return entry
        entry = self.entries[piece]
        if urgency < entry.urgency:
            for link in entry.path:
                if self._lines[link][entry.urgency].pop(piece, None) is not None:
                    self._lines[link][urgency][piece] = entry
            entry.urgency, entry.upgraded = urgency, True
            self.demands += 1
        return entry

    def bring(self, piece: int, host: int, chunks: int, device: int = 0) -> Entry:
        """Ask for a piece in a slot of the middle tier, where it stays the caller's once it is
        there; nothing of it may be on its way."""
        path = self.paths[device][:1]
        entry = self.entries[piece] = Entry(
            piece, -1, chunks, Urgency.DEMAND, path, [], host_slot=host, host_only=True
        )
        self._lines[path[0]][Urgency.DEMAND][piece] = entry
        self.demands += 1
        return entry

    def load(self, wanted: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """(link, piece, chunks) that a new demand waits for: what is left of the `wanted`, and of
        others what is on a lane."""
        for piece in wanted:
            if (entry := self.entries.get(piece)) is not None:
                yield entry.path[0], piece, 0 if entry.host_resident else entry.chunks - entry.read
                yield entry.path[-1], piece, entry.chunks - entry.landed
        for (link, _), (entry, _) in self._carried.items():
            if entry.piece not in wanted:
                yield link, entry.piece, 1

    def start(self) -> Iterator[StartChunk]:
        """Give idle lanes chunks, the last links first, until none is idle or none may start."""
        for link in self._last_first:
            idle, (demands, prefetches) = self._idle[link], self._lines[link]
            while idle and (line := demands or prefetches):
                for piece in line:
                    entry = line[piece]
                    break
                first = link == entry.path[0]
                staging = first and self._free_staging is not None and entry.host_slot < 0
                if staging and not self._has_staging(entry.urgency):
                    break
                if first:
                    chunk, staging_slot = entry.started, -1
                    if self._free_staging is not None and entry.host_slot < 0:
                        staging_slot = self._free_staging.pop()
                    entry.started += 1
                    more = entry.started < entry.chunks
                else:
                    staged = entry.staged[entry.path.index(link)]
                    chunk, staging_slot = staged.popleft()
                    more = bool(staged)
                if not more:
                    del line[piece]
                entry.moving += 1
                self.moving += link in self.paced
                begins = chunk == 0 and link == entry.path[int(entry.host_resident)]
                lane, demand = idle.pop(), entry.urgency is Urgency.DEMAND
                action = StartChunk(
                    lane,
                    entry.piece,
                    entry.slot,
                    chunk,
                    link,
                    staging_slot,
                    demand,
                    entry.host_slot,
                    begins,
                )
                self._carried[link, lane] = entry, action
                yield action

    def open_for(self, urgency: Urgency, device: int = 0) -> bool:
        """Whether one more piece of this urgency could begin at once, on its way to a device.

        With a middle tier it may need the last link alone, so nothing may wait for that.
        """
        path = self.paths[device]
        if self.host is not None and any(self._lines[path[-1]]):
            return False
        return bool(self._idle[path[0]]) and self._has_staging(urgency)

    def _has_staging(self, urgency: Urgency) -> bool:
        """Whether a staging slot is free; prefetches leave one for every lane."""
        if self._free_staging is None:
            return True
        return len(self._free_staging) > (self.lanes[0] if urgency is Urgency.PREFETCH else 0)

    def land(self, link: int, lane: int, ok: bool = True) -> Entry:
        """A lane has delivered its chunk, or failed to; a failure drops the entry.

        The entry leaves the queue (`finished`) with its last chunk, or once nothing of it moves.
        """
        entry, action = self._carried.pop((link, lane))
        self._idle[link].append(lane)
        entry.moving -= 1
        self.moving -= link in self.paced
        entry.read += ok and link == entry.path[0]
        last = link == entry.path[-1]
        if not ok and not entry.dropped:
            entry.failed = True
            self.drop(entry.piece)
        if last or entry.dropped:
            entry.landed += last and ok
            self._vacate(action.staging_slot)
        else:
            hop = entry.path.index(link) + 1
            entry.staged[hop].append((action.chunk, action.staging_slot))
            self._lines[entry.path[hop]][entry.urgency].setdefault(entry.piece, entry)
        if entry.moving == 0 and (entry.dropped or entry.landed == entry.chunks):
            entry.finished = True
            if entry.piece in self.entries:
                self._leave(entry)
        return entry

    def drop(self, piece: int) -> bool:
        """Start no more chunks of a piece. True where nothing of it is moving: its slot is free.

        Where a chunk is still moving the entry stays until that has landed.
        """
        entry = self.entries[piece]
        entry.dropped = True
        for link in entry.path:
            self._lines[link][entry.urgency].pop(piece, None)
        for staged in entry.staged:
            while staged:
                self._vacate(staged.popleft()[1])
        if entry.moving:
            return False
        self._leave(entry)
        return True

    def _leave(self, entry: Entry) -> None:
        """Nothing of a piece moves any more: it has arrived, or was given up."""
        del self.entries[entry.piece]
        self.demands -= entry.urgency is Urgency.DEMAND
        if entry.host_slot >= 0 and not (entry.host_only and entry.arrived):
            assert self.host is not None
            self.host.leave(entry.piece, entry.read == entry.chunks)

    def _vacate(self, staging_slot: int) -> None:
        if self._free_staging is not None and staging_slot >= 0:
            self._free_staging.append(staging_slot)


def count_staging_slots(lanes: Sequence[int]) -> int:
    """Seats that a chain of links needs: for every lane one in use, and one that waits."""
    return 2 * sum(lanes)
