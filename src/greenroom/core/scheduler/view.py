"""What options and drivers may know of the scheduler's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from greenroom.core.cache.placement import Placement
from greenroom.core.cache.scope import Scope
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints
from greenroom.core.plan import Flags, Flight
from greenroom.core.prefetch.lookahead import Accuracy
from greenroom.core.transfers.transfers import Transfers


class StateView:
    """The `View` of options; the rest is for drivers.

    accuracy: of predictions
    lanes:    transfers at a time on each link
    staging_slots: of all links
    sources:  the links that what is brought crosses first
    """

    def __init__(
        self, placement: Placement, transfers: Transfers, accuracy: Accuracy, counts: Counts
    ) -> None:
        self.pieces, self.accuracy = placement.pieces, accuracy
        self._placement, self._transfers, self._counts = placement, transfers, counts
        queue = transfers.queue
        self.lanes, self.staging_slots = queue.lanes, queue.staging_slots
        self.sources = {path[0] for path in queue.paths}

    # ---- for drivers

    def counted(self) -> Counts:
        """What happened so far; a copy."""
        return replace(self._counts)

    @property
    def misses(self) -> int:
        """Requests so far that were no hits."""
        return self._counts.misses

    @property
    def slots(self) -> int:
        """Slots of the cache, of whole experts or of their tops."""
        return self._placement.cache.capacity

    @property
    def scope(self) -> Scope:
        """Which layers share slots."""
        return self._placement.cache.scope

    @property
    def borrow_limit(self) -> int:
        """Slots that may be on loan at a time."""
        return self._placement.buffer.size

    def group_sizes(self) -> list[int]:
        """Slots of each group of layers (or devices) that share slots."""
        return self._placement.cache.sizes

    def check_capacity(self, capacity: int, pinned_set: Ints | None = None) -> None:
        """BudgetError where so many slots cannot be, or leave a group none beside what is kept (or
        shall be)."""
        self._placement.cache.sizes_for(capacity, pinned_set)

    # ---- for options

    def resident(self, experts: Ints) -> Flags:
        flags: Flags = self._placement.cache.state.slot_of[experts] >= 0
        return flags

    def borrowed(self, expert: int) -> bool:
        return expert in self._placement.buffer.borrowed

    def in_flight(self, expert: int) -> Flight | None:
        entry = self._transfers.entries.get(expert)
        if entry is None:
            return None
        return Flight(entry.started == entry.chunks and not entry.dropped)

    def in_host(self, expert: int) -> bool:
        return self._transfers.host is not None and self._transfers.host.has(expert)

    def room(self, expert: int) -> int:
        cache, buffer = self._placement.cache, self._placement.buffer
        return cache.open(int(cache.state.group_of[expert])) - len(buffer.borrowed)

    def promotions(self) -> int:
        if self._placement.cache.policy.preload is not None:
            return 0
        return self._placement.buffer.size

    def backlog(self, own: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        return list(self._transfers.queue.load(own))
