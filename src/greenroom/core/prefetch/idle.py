"""Idle-time prefetching: experts are read into free cache slots while no request is computed.

The experts come in the order of their expected use, and nothing is evicted for them. An expert
becomes resident when all of it has arrived.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints
from greenroom.core.transfers.queue import Urgency
from greenroom.core.transfers.transfers import Transfers


class IdlePrefetch:
    """Reads experts into free cache slots between requests, and counts those that are used.

    candidates:   experts that may be read now, the best last; empty while a request is computed
    observes:     whether `routed` must be called with the experts of each step
    all_resident: the path by which steps bypass the scheduler, if there is one now
    """

    def __init__(self, placement: Placement, transfers: Transfers, counts: Counts) -> None:
        self._placement, self._transfers, self._counts = placement, transfers, counts
        self.candidates: list[int] = []
        self.observes = False
        self.all_resident: AllResident | None = None
        self._unused = np.zeros(placement.pieces.experts, np.bool_)  # read, but not requested yet

    def begin(self, experts: Ints) -> None:
        """Read experts, most likely to be used first, until a request is computed."""
        self.candidates = experts[::-1].tolist()
        self.observes = True

    def end(self) -> None:
        """Begin no further reads; those under way are completed, after all demands."""
        self.candidates = []

    def begin_next(self) -> bool:
        """Begin to read the best candidate into a free slot; False if no read can begin now."""
        placement, queue = self._placement, self._transfers.queue
        cache = placement.cache
        free, group_of = cache.state.free_count, cache.state.group_of
        if placement.resizing:
            return False
        if not free.any():
            self.candidates = []
        while self.candidates:
            expert = self.candidates[-1]
            if not queue.open_for(Urgency.PREFETCH, placement.home_device[expert]):
                return False
            self.candidates.pop()
            if free[group_of[expert]] > 0 and not placement.has_slot(expert):
                slot, _ = cache.borrow(expert)
                layer = int(placement.pieces.layer[expert])
                placement.buffer.begin_prefetch(expert, slot, layer, 1.0, promotion=True, idle=True)
                self._transfers.prefetch(expert, int(placement.tier_slots[slot]))
                return True
        return False

    def landed(self, expert: int) -> None:
        """Record that an expert which was read between requests has become resident."""
        self._unused[expert] = self.observes = True
        self._counts.idle += 1

    def routed(self, experts: Ints) -> None:
        """Count the experts of a step that were read between requests, at their first request."""
        self.candidates = []
        mine = experts[self._unused[experts]]
        if mine.size:
            hits = self._placement.cache.state.slot_of[mine] >= 0  # the others were evicted
            self._counts.idle_used += int(hits.sum())
            self._unused[mine] = False
        self.observes = bool(self._unused.any())

    def used_by_path(self) -> int:
        """Count the first requests for experts that the all-resident path has served so far."""
        path = self.all_resident
        return 0 if path is None else int(np.count_nonzero(self._unused & (path.used > 0)))

    def leave_all_resident(self) -> None:
        """Count what the all-resident path has served, before the path ends."""
        self._counts.idle_used += self.used_by_path()
        if self.all_resident is not None:
            self._unused[self.all_resident.used > 0] = False
        self.all_resident = None
