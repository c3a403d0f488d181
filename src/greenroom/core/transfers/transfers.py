"""Transfers: pieces on their way to slots, and the chunks that links carry for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Action
from greenroom.core.plan import Option, overrides
from greenroom.core.transfers.queue import Entry, TransferQueue, Urgency
from greenroom.core.transfers.tiers import HostTier

OnLink = Callable[[float, int, bool, bool], None]  # (now, chunks moving, demands, landed)


class Transfers:
    """The queue of transfers. It chooses where a piece comes from when the piece gets its slot.

    An exact expert whose nested copy is in its slot comes as what the copy lacks, and leases the
    copy until the two are joined.
    """

    def __init__(
        self,
        placement: Placement,
        lanes: int | Sequence[int],
        staging_slots: int | None,
        host: HostTier | None,
        counts: Counts,
        options: Sequence[Option],
        on_link: OnLink,
    ) -> None:
        pieces = placement.pieces
        chain = (lanes,) if isinstance(lanes, int) else lanes
        self.queue = TransferQueue(chain, staging_slots, host, pieces.devices)
        self.host = host
        self.entries = self.queue.entries
        self.busy = False  # something is on its way, or the pace of links is to be told
        self._placement, self._counts, self._on_link = placement, counts, on_link
        self._chunks: list[int] = pieces.chunks.tolist()
        self._home = placement.home_device
        self._nbytes: list[int] = pieces.nbytes.tolist()
        self._nested = pieces.copies is not None and bool(pieces.copies.remainder)
        self.copy_slots: dict[int, int] = {}  # piece -> the tier's slot of the copy that it joins
        self._on_start = [o.started for o in options if overrides(o, "started")]
        self._on_land = [o.landed for o in options if overrides(o, "landed")]

    # ---- asking for pieces

    def demand(self, expert: int, slot: int) -> int:
        """Ask for a step's expert. Returns the piece that comes: all of it, or what its copy
        lacks."""
        extras = self._placement.secondary
        piece = expert
        if self._nested and extras.whole(expert):
            piece = 2 * self._placement.pieces.experts + expert
            self.copy_slots[piece] = self._placement.secondary_tier_slot(extras.claim(expert))
            self._counts.joined += 1
        self.add(piece, slot)
        return piece

    def add(self, piece: int, slot: int, urgency: Urgency = Urgency.DEMAND) -> Entry:
        """Ask for a piece; one that is on its way keeps its slot."""
        self.busy = True
        return self.queue.add(piece, slot, self._chunks[piece], urgency, self._home[piece])

    def bring_to_host(self, piece: int, slot: int) -> None:
        """Ask for a piece in host memory, where it is to be computed."""
        self.busy = True
        self.queue.bring(piece, slot, self._chunks[piece], self._home[piece])

    def prefetch(self, piece: int, slot: int) -> None:
        """Ask for a piece before its step."""
        self.add(piece, slot, Urgency.PREFETCH)
        self._counts.prefetches += 1

    def drop_prefetch(self, piece: int) -> None:
        """Give up a prefetch that is under way; a chunk on a lane lands first."""
        if not self.entries[piece].dropped:
            self._counts.dropped += 1
            if self.queue.drop(piece):
                self._placement.vacate(piece)

    def forget_join(self, piece: int) -> None:
        """End the lease of a copy whose expert did not come."""
        if self.copy_slots.pop(piece, -1) >= 0:
            self._placement.secondary.done(piece % self._placement.pieces.experts)

    # ---- chunks

    def start(self, actions: list[Action], now: float) -> None:
        """Give every idle lane a chunk."""
        for chunk in self.queue.start():
            if self.copy_slots and (joins := self.copy_slots.pop(chunk.piece, -1)) >= 0:
                chunk.copy_slot = joins
                self._placement.secondary.done(chunk.piece % self._placement.pieces.experts)
            actions.append(chunk)
            for started in self._on_start:
                started(chunk.link, chunk.lane, now)
        if self._placement.buffer.size:  # the pace of links is of use to prefetches alone
            self._on_link(now, self.queue.moving, self.queue.demands > 0, False)
        self.busy = bool(self.entries)

    def land(self, link: int, lane: int, ok: bool, now: float) -> Entry:
        """A lane has delivered its chunk, or failed to."""
        entry = self.queue.land(link, lane, ok)
        for landed in self._on_land:
            nbytes = self._nbytes[entry.piece] / self._chunks[entry.piece]
            landed(link, lane, nbytes, now)
        if self._placement.buffer.size and link in self.queue.paced:
            self._on_link(now, self.queue.moving, self.queue.demands > 0, True)
        return entry
