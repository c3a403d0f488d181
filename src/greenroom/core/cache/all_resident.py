"""The all-resident path: steps whose experts all have slots bypass the scheduler's event machine.

While LRU evicts nothing its state is the order of use, so this order can be passed to the policy
later, when the cache shrinks. To call the policy in every step takes ten microseconds of a layer's
thirty, and five times as long after the weights have displaced everything from the processor's
caches.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints


class AllResident:
    """The order in which cached experts were used, while steps bypass the event machine.

    slot_of:    the cache's slot of each expert, -1 where it has none
    tier_slots: the tier's slot for each slot of the cache
    used:       the number of the last step that used each expert, from 1; 0: none has
    steps:      steps so far
    """

    def __init__(self, placement: Placement, counts: Counts) -> None:
        self._cache, self._counts = placement.cache, counts
        self.slot_of, self.tier_slots = placement.cache.state.slot_of, placement.tier_slots
        self.used = np.zeros(self.slot_of.size, np.int64)
        self.steps = 0

    @staticmethod
    def of(placement: Placement, counts: Counts) -> AllResident | None:
        """Make an `AllResident` for an LRU cache with a slot for every expert; else None."""
        cache = placement.cache
        if cache.policy.name != "lru" or cache.capacity < cache.state.slot_of.size:
            return None
        return AllResident(placement, counts)

    def step(self, experts: Ints) -> Ints | None:
        """Serve a step whose experts are all resident; returns the experts' slots in memory.

        The experts are in ascending order, the slots are numbered as in the tier.

        None, and nothing is counted, where one of them has no slot.
        """
        slots: Ints = self.slot_of[experts]
        if slots.min() < 0:
            return None
        self.used[experts] = self.steps + 1
        self.count(experts.size)
        place: Ints = self.tier_slots[slots]
        return place

    def count(self, experts: int) -> None:
        """Count a step whose experts are all cache hits.

        The caller updates `used`.
        """
        self.steps += 1
        self._counts.steps += 1
        self._counts.requests += experts
        self._counts.hits += experts

    def report(self) -> None:
        """Report the experts used so far to the eviction policy, in their order of use.

        The order is by step, then by id.
        """
        order = np.argsort(self.used, kind="stable")
        order = order[self.used[order] > 0]
        if order.size:
            clock, _, request, _ = self._cache.now
            self._cache.serve(order, clock, "none", request=request)
        self.used[:] = self.steps = 0
