"""Steps whose experts are all resident: served at once, as the scheduler's events would."""

from __future__ import annotations

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints
from greenroom.core.prefetch.prefetcher import Prefetcher
from greenroom.core.transfers.transfers import Transfers


class ResidentSteps:
    """Serves steps whose experts are all resident without events, while nothing else is decided.

    path: records the steps of an LRU cache with a slot for every expert; None: another cache
    """

    path: AllResident | None = None

    def __init__(
        self,
        placement: Placement,
        transfers: Transfers,
        prefetcher: Prefetcher,
        counts: Counts,
        needs_events: bool,
    ) -> None:
        """Connect the scheduler's parts; `needs_events`: its options decide about every step."""
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self._lookahead, self._idle = prefetcher.lookahead, prefetcher.idle
        self._needs_events, self._layers = needs_events, placement.pieces.layers
        self._is_lru = placement.cache.policy.name == "lru"

    def serve(self, event: Routed) -> Ints | None:
        """Serve a step; return the slots of its experts in memory.

        Returns None, and counts nothing, if an expert is missing or there is more to decide. No
        step may be under way.
        """
        if self.path is not None:
            return self.path.step(event.experts)
        placement, idle, experts = self._placement, self._idle, event.experts
        if (
            self._needs_events
            or self._transfers.busy
            or placement.buffer.size
            or placement.buffer.borrowed
            or placement.resizing
            or (placement.holds_all and self._is_lru)  # an event begins the path
            or idle.observes
            or idle.candidates
            or self._lookahead.candidates
            or -1 in placement.cache.state.slot_of[experts].tolist()
        ):
            return None
        served = placement.cache.serve(
            experts, event.step * self._layers + event.layer, "none", request=event.request,
            prefill=event.prefill, rows=event.rows, weights=event.weights,
        )  # fmt: skip
        self._counts.steps += 1
        self._counts.requests += experts.size
        self._counts.hits += experts.size
        slots: Ints = placement.tier_slots[served.slots]
        return slots

    def enter_path(self) -> None:
        """Let the path record later steps, if the cache is an LRU cache."""
        self.path = self._idle.all_resident = AllResident.of(self._placement, self._counts)

    def leave_path(self) -> None:
        """Report the steps that the path has recorded to the policy."""
        if self.path is not None:
            self._idle.leave_all_resident()
            self.path.report()
            self.path = None
