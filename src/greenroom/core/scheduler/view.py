"""What options may know of the scheduler's state."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.cache.placement import Placement
from greenroom.core.pieces import Ints
from greenroom.core.plan import Flags, Flight
from greenroom.core.transfers.transfers import Transfers


class StateView:
    """The `View` of a placement and its transfers."""

    def __init__(self, placement: Placement, transfers: Transfers) -> None:
        self.pieces = placement.pieces
        self._placement, self._transfers = placement, transfers

    def resident(self, experts: Ints) -> Flags:
        flags: Flags = self._placement.cache.state.slot_of[experts] >= 0
        return flags

    def borrowed(self, expert: int) -> bool:
        return expert in self._placement.buffer.held

    def in_flight(self, expert: int) -> Flight | None:
        entry = self._transfers.entries.get(expert)
        if entry is None:
            return None
        return Flight(entry.started == entry.chunks and not entry.dropped)

    def in_host(self, expert: int) -> bool:
        return self._transfers.host is not None and self._transfers.host.has(expert)

    def room(self, expert: int) -> int:
        cache, buffer = self._placement.cache, self._placement.buffer
        return cache.open(int(cache.state.group_of[expert])) - len(buffer.held)

    def promotions(self) -> int:
        if self._placement.cache.policy.preload is not None:
            return 0
        return self._placement.buffer.size

    def backlog(self, own: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        return list(self._transfers.queue.load(own))
