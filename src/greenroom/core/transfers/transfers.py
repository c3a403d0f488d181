"""Transfers of experts to memory slots, in chunks over links."""

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
    """Transfers of experts to their memory slots, by a queue for the links.

    A nested low-precision copy is a part of its expert's own bytes. If the copy is in memory and
    the exact expert is needed, only the rest of its bytes (the remainder) is transferred. The copy
    keeps its slot until the transfer starts, and is copied to the expert's slot then.
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
        self.busy = False  # a transfer is under way, or the pace of links is to be updated
        self._placement, self._counts, self._on_link = placement, counts, on_link
        self._chunks: list[int] = pieces.chunks.tolist()
        self._home = placement.home_device
        self._nbytes: list[int] = pieces.nbytes.tolist()
        self._nested = pieces.copies is not None and bool(pieces.copies.remainder)
        self.copy_slots: dict[int, int] = {}  # remainder -> the tier's slot of its copy
        self._orders = [o.order for o in options if overrides(o, "order")]
        self._on_start = [o.started for o in options if overrides(o, "started")]
        self._on_land = [o.landed for o in options if overrides(o, "landed")]

    # ---- requests for pieces

    def demand(self, expert: int, slot: int) -> int:
        """Request an expert that its layer needs now; return the id of what is transferred.

        This is the expert, or only its remainder: the bytes that its low-precision copy in memory
        lacks.
        """
        secondary = self._placement.secondary
        piece = expert
        if self._nested and secondary.is_complete(expert):
            piece = 2 * self._placement.pieces.experts + expert
            self.copy_slots[piece] = self._placement.secondary_tier_slot(secondary.claim(expert))
            self._counts.joined += 1
        self.add(piece, slot)
        return piece

    def add(self, piece: int, slot: int, urgency: Urgency = Urgency.DEMAND) -> Entry:
        """Request the transfer of an expert (or segment, copy) to a slot; return its queue entry.

        A transfer that is on its way already keeps its slot.
        """
        self.busy = True
        return self.queue.add(piece, slot, self._chunks[piece], urgency, self._home[piece])

    def bring_to_host(self, piece: int, slot: int) -> None:
        """Request an expert's transfer to a slot of host memory, where the host computes it."""
        self.busy = True
        self.queue.add_to_host(piece, slot, self._chunks[piece], self._home[piece])

    def prefetch(self, piece: int, slot: int) -> None:
        """Request the transfer of a predicted expert before its layer is computed."""
        self.add(piece, slot, Urgency.PREFETCH)
        self._counts.prefetches += 1

    def drop_prefetch(self, piece: int) -> None:
        """Drop the prefetch of an expert; its slot is free once chunks on their way have landed."""
        if not self.entries[piece].dropped:
            self._counts.dropped += 1
            if self.queue.drop(piece):
                self._placement.vacate(piece)

    def release_copy(self, piece: int) -> None:
        """Release a low-precision copy if the transfer of its expert's remainder never started."""
        if self.copy_slots.pop(piece, -1) >= 0:
            self._placement.secondary.release(piece % self._placement.pieces.experts)

    # ---- chunks

    def start(self, actions: list[Action], now: float) -> None:
        """Start the transfer of a chunk on every idle lane of the links."""
        for order in self._orders:
            self.queue.reorder(order)
        for chunk in self.queue.start():
            if self.copy_slots and (copy := self.copy_slots.pop(chunk.piece, -1)) >= 0:
                chunk.copy_slot = copy
                self._placement.secondary.release(chunk.piece % self._placement.pieces.experts)
            actions.append(chunk)
            for started in self._on_start:
                started(chunk.link, chunk.lane, now)
        if self._placement.buffer.size:  # only prefetches need the pace of links
            self._on_link(now, self.queue.moving, self.queue.demands > 0, False)
        self.busy = bool(self.entries)

    def land(self, link: int, lane: int, ok: bool, now: float) -> Entry:
        """Record that a link has delivered a chunk of an expert, or failed to.

        Returns the entry of the expert's transfer.
        """
        entry = self.queue.land(link, lane, ok)
        for landed in self._on_land:
            nbytes = self._nbytes[entry.piece] / self._chunks[entry.piece]
            landed(link, lane, nbytes, now)
        if self._placement.buffer.size and link in self.queue.paced:
            self._on_link(now, self.queue.moving, self.queue.demands > 0, True)
        return entry
