"""The transfer queue: the order in which links carry the chunks of experts.

A piece is an unsplit expert, or a segment or copy of one. It crosses one link (disk to slots) or a
chain of links (disk to host to device). Every link has lanes, a queue of demands (a step waits for
them) and a queue of prefetches. Demands go first; each queue is first in, first out. A piece has
one entry; upgrading a prefetch to a demand keeps the chunks that were moved. A lane completes the
chunk that it has started, so a new demand waits for at most one chunk in each lane. While another
reader of the disk has its turn, `holds_prefetches` is set, and prefetches start no chunk there.

In a chain a chunk occupies a staging slot from the start of its first transfer to the end of its
last. Prefetches leave a staging slot free for every lane, so that a demand never waits for one that
a prefetch holds. If host memory between two links caches pieces (see `tiers`), a piece with a slot
in host memory passes through this slot instead, and a piece that is complete in host memory crosses
the last link only.

Each of several devices has its own last link; the links before it are shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat

from greenroom.core.events import StartChunk
from greenroom.core.home_devices import spread
from greenroom.core.transfers.tiers import HostTier


class Urgency(IntEnum):
    """The urgency of an expert's transfer: a layer waits for a demand, not for a prefetch."""

    DEMAND = 0
    PREFETCH = 1


@dataclass(slots=True)
class Entry:
    """The queued transfer of an expert, segment or copy, until its last chunk has arrived.

    A dropped transfer stays in the queue while chunks of it move.

    path:          the links that lead to the piece's device
    staged:        for each link of the path, the (chunk, staging slot) that wait for the link
    started:       the number of chunks given to the first link
    read:          the number of chunks that have crossed the first link
    landed:        the number of chunks that have crossed the last link
    moving:        the number of chunks on lanes now
    dropped:       no more chunks start
    failed:        a chunk could not be delivered
    upgraded:      the transfer began as a prefetch, and is a demand now
    host_slot:     the piece's slot in host memory; -1: none
    host_resident: all of the piece was in host memory from the start
    host_only:     the piece stays in host memory, and does not go on to the device
    finished:      its last chunk has landed, or it was dropped and nothing of it moves
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
    def begun(self) -> bool:
        """Tell whether any chunk of a transfer has been given to a link."""
        return self.moving > 0 or self.landed > 0 or (self.read > 0 and not self.host_resident)

    @property
    def arrived(self) -> bool:
        """Tell whether all chunks of a transfer have been delivered."""
        return self.landed == self.chunks and not self.failed


class TransferQueue:
    """The queue of experts' transfers; it says which chunks each link can start."""

    def __init__(
        self,
        lanes: Sequence[int] = (2,),
        staging_slots: int | None = None,
        host: HostTier | None = None,
        devices: int = 1,
    ) -> None:
        """Build an empty transfer queue for a chain of links.

        lanes:         transfers at a time, on each link of the chain to a device
        staging_slots: slots for chunks between two links; None: as many as the lanes need
        host:          the cache in host memory, between the two links of a chain
        devices:       the number of devices; each has its own last link

        ValueError if `host` has not two links, or there are too few staging slots.
        """
        if host is not None and len(lanes) != 2:
            raise ValueError(f"a cache in host memory needs a chain of two links, got {len(lanes)}")
        self.host, before = host, len(lanes) - 1
        self.paths = [(*range(before), before + device) for device in range(devices)]
        self.sources = {path[0] for path in self.paths}  # the links from disk
        chained, self.lanes = before > 0, spread(lanes, devices)
        # The links that set the pace: the first one, or the last ones where the host holds all.
        first = 1 if host is not None and host.holds_all else 0
        self.paced = {path[first] for path in self.paths}
        self.entries: dict[int, Entry] = {}
        self.demands = 0  # entries that are demands
        self.moving = 0  # chunks on lanes of the paced links
        self.holds_prefetches = False  # on the links from disk
        # Of each link, the queues of demands and of prefetches.
        self._queues = [(dict[int, Entry](), dict[int, Entry]()) for _ in self.lanes]
        self._last_first = tuple(range(len(self.lanes)))[::-1]
        self._idle = [list(range(n))[::-1] for n in self.lanes]
        self._on_lanes: dict[tuple[int, int], tuple[Entry, StartChunk]] = {}
        self.staging_slots = (
            count_staging_slots(self.lanes) if staging_slots is None else staging_slots
        )
        if chained and self.staging_slots <= lanes[0]:
            raise ValueError(
                f"{lanes[0]} lanes need more than {lanes[0]} staging slots,"
                f" got {self.staging_slots}"
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
        """Request the transfer of an expert, segment or copy; return its entry in the queue.

        A transfer that is queued already keeps its slot. If it is a prefetch and `urgency` is
        DEMAND (a layer waits for it), it becomes a demand.
        """
        if piece not in self.entries:
            path = self.paths[device]
            staged = [deque[tuple[int, int]]() for _ in path] if len(path) > 1 else []
            entry = self.entries[piece] = Entry(piece, slot, chunks, urgency, path, staged)
            if self.host is not None:
                entry.host_slot, entry.host_resident = self.host.request(piece)
            if entry.host_resident:
                entry.started = entry.read = chunks
                staged[1].extend(zip(range(chunks), repeat(-1)))
            self._queues[path[int(entry.host_resident)]][urgency][piece] = entry
            self.demands += urgency is Urgency.DEMAND
            return entry
        entry = self.entries[piece]
        if urgency < entry.urgency:
            for link in entry.path:
                if self._queues[link][entry.urgency].pop(piece, None) is not None:
                    self._queues[link][urgency][piece] = entry
            entry.urgency, entry.upgraded = urgency, True
            self.demands += 1
        return entry

    def add_to_host(self, piece: int, host_slot: int, chunks: int, device: int = 0) -> Entry:
        """Request an expert's transfer to a slot in host memory, where the host computes it.

        The expert must not be on its way already. The caller releases the slot later.
        """
        path = self.paths[device][:1]
        entry = self.entries[piece] = Entry(
            piece, -1, chunks, Urgency.DEMAND, path, [], host_slot=host_slot, host_only=True
        )
        self._queues[path[0]][Urgency.DEMAND][piece] = entry
        self.demands += 1
        return entry

    def reorder(self, order: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Put the demanded transfers of each link that have not begun into another order.

        `order` sorts the ids of what is transferred: experts, segments or copies. Transfers of
        which a chunk has moved stay in front.
        """
        for queue, _ in self._queues:
            if len(queue) > 1:
                waiting = [piece for piece, entry in queue.items() if not entry.begun]
                for piece in order(waiting):
                    queue[piece] = queue.pop(piece)

    def backlog(self, step_pieces: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the chunks that a newly demanded expert must wait for.

        step_pieces: ids of the current step's experts (or segments, copies)

        Yields (link, piece, chunks): the chunks that these pieces still lack on the first and on
        the last link of their path, and one for each other chunk that a link carries now.
        """
        for piece in step_pieces:
            if (entry := self.entries.get(piece)) is not None:
                yield entry.path[0], piece, 0 if entry.host_resident else entry.chunks - entry.read
                yield entry.path[-1], piece, entry.chunks - entry.landed
        for (link, _), (entry, _) in self._on_lanes.items():
            if entry.piece not in step_pieces:
                yield link, entry.piece, 1

    def is_moving(self, action: StartChunk) -> bool:
        """Tell whether a chunk is on its lane: it has neither landed nor failed."""
        moving = self._on_lanes.get((action.link, action.lane))
        return moving is not None and moving[1] is action

    def lengths(self) -> list[tuple[int, int, int]]:
        """Return each link's numbers of waiting demands, waiting prefetches, and moving chunks."""
        return [
            (len(demands), len(prefetches), lanes - len(idle))
            for (demands, prefetches), lanes, idle in zip(
                self._queues, self.lanes, self._idle, strict=True
            )
        ]

    def start(self) -> Iterator[StartChunk]:
        """Start transfers of chunks on idle lanes, as long as any can start.

        The last links go first. Yields an action for each chunk.
        """
        for link in self._last_first:
            idle, (demands, prefetches) = self._idle[link], self._queues[link]
            if self.holds_prefetches and link in self.sources:
                prefetches = {}
            while idle and (queue := demands or prefetches):
                for piece in queue:
                    entry = queue[piece]
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
                    del queue[piece]
                entry.moving += 1
                self.moving += link in self.paced
                starts = chunk == 0 and link == entry.path[int(entry.host_resident)]
                lane, demand = idle.pop(), entry.urgency is Urgency.DEMAND
                action = StartChunk(
                    lane, entry.piece, entry.slot, chunk, link, staging_slot, demand,
                    entry.host_slot, starts,
                )  # fmt: skip
                self._on_lanes[link, lane] = entry, action
                yield action

    def open_for(self, urgency: Urgency, device: int = 0) -> bool:
        """Tell whether one more expert's transfer to a device could start at once.

        If host memory caches experts, the transfer may need the last link only, so it is also
        required that nothing waits for this link.
        """
        path = self.paths[device]
        if self.host is not None and any(self._queues[path[-1]]):
            return False
        if self.holds_prefetches and urgency is Urgency.PREFETCH:
            return False
        return bool(self._idle[path[0]]) and self._has_staging(urgency)

    def _has_staging(self, urgency: Urgency) -> bool:
        """Tell whether a staging slot may be used; prefetches leave one for every lane."""
        if self._free_staging is None:
            return True
        return len(self._free_staging) > (self.lanes[0] if urgency is Urgency.PREFETCH else 0)

    def land(self, link: int, lane: int, ok: bool = True) -> Entry:
        """Record that a link has delivered a chunk, or failed to deliver it; return the entry.

        After a failure (`ok` is False) the transfer is dropped. The entry of a transfer leaves the
        queue, `finished`, with its last chunk; a dropped one leaves as soon as none of its chunks
        moves.
        """
        entry, action = self._on_lanes.pop((link, lane))
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
            self._free_slot(action.staging_slot)
        else:
            hop = entry.path.index(link) + 1
            entry.staged[hop].append((action.chunk, action.staging_slot))
            self._queues[entry.path[hop]][entry.urgency].setdefault(entry.piece, entry)
        if entry.moving == 0 and (entry.dropped or entry.landed == entry.chunks):
            entry.finished = True
            if entry.piece in self.entries:
                self._remove(entry)
        return entry

    def drop(self, piece: int) -> bool:
        """Drop an expert's transfer, so that no more of its chunks start.

        Returns True if none of its chunks is moving: its slot is free. Otherwise the entry stays in
        the queue until these chunks have landed.
        """
        entry = self.entries[piece]
        entry.dropped = True
        for link in entry.path:
            self._queues[link][entry.urgency].pop(piece, None)
        for staged in entry.staged:
            while staged:
                self._free_slot(staged.popleft()[1])
        if entry.moving:
            return False
        self._remove(entry)
        return True

    def _remove(self, entry: Entry) -> None:
        """Remove an entry of which nothing moves: it has arrived, or was dropped."""
        del self.entries[entry.piece]
        self.demands -= entry.urgency is Urgency.DEMAND
        if entry.host_slot >= 0 and not (entry.host_only and entry.arrived):
            assert self.host is not None
            self.host.release(entry.piece, entry.read == entry.chunks)

    def _free_slot(self, staging_slot: int) -> None:
        if self._free_staging is not None and staging_slot >= 0:
            self._free_staging.append(staging_slot)


def count_staging_slots(lanes: Sequence[int]) -> int:
    """Count the staging slots (for chunks between links) that a chain of links needs.

    There are two for every lane: one for the chunk that the lane carries, one for a chunk that
    waits.
    """
    return 2 * sum(lanes)
