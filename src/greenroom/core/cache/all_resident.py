"""The all-resident path: steps whose experts are all loaded bypass the scheduler's event machine.

A step is one layer of one forward pass. While an LRU cache evicts nothing, its state is the order
in which experts were used. So this order is recorded here, and passed to the policy when the cache
shrinks. A call of the policy in every step would take 10 of a layer's 30 microseconds, and five
times as long when the weights have displaced the policy's data from the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints


class AllResident:
    """The order in which cached experts were used, while steps bypass the event machine.

    slot_of:    the cache slot of each expert; -1 if the expert is not loaded
    tier_slots: for each cache slot, the number of its slot in memory
    used:       for each expert, the number of the last step that used it; 0 if none has
    steps:      the number of steps so far; the first step has number 1
    """

    def __init__(self, placement: Placement, counts: Counts) -> None:
        self._cache, self._counts = placement.cache, counts
        self.slot_of, self.tier_slots = placement.cache.state.slot_of, placement.tier_slots
        self.used = np.zeros(self.slot_of.size, np.int64)
        self.steps = 0

    @staticmethod
    def of(placement: Placement, counts: Counts) -> AllResident | None:
        """Return an `AllResident` for an LRU cache with a slot for every expert, else None."""
        cache = placement.cache
        if cache.policy.name != "lru" or cache.capacity < cache.state.slot_of.size:
            return None
        return AllResident(placement, counts)

    def step(self, experts: Ints) -> Ints | None:
        """Serve a step whose experts are all resident; returns the experts' slots in memory.

        `experts` are dense ids (layer offset + expert number), ascending. If one of them is not
        loaded yet, the method counts nothing and returns None.
        """
        slots: Ints = self.slot_of[experts]
        if -1 in slots.tolist():  # faster than NumPy's minimum
            return None
        self.used[experts] = self.steps + 1
        self.count(experts.size)
        place: Ints = self.tier_slots[slots]
        return place

    def serve(self, experts: Ints, sizes: Sequence[int]) -> bool:
        """Serve steps of different layers, each with a size, whose experts are all resident.

        `experts` are those of all steps. If one of them is not loaded yet, the method counts
        nothing and returns False.
        """
        if -1 in self.slot_of[experts].tolist():
            return False
        sizes = [size for size in sizes if size]
        self.used[experts] = np.repeat(np.arange(1, len(sizes) + 1) + self.steps, sizes)
        self.count(experts.size, len(sizes))
        return True

    def count(self, experts: int, steps: int = 1) -> None:
        """Count steps (layers of a pass) whose experts are all cache hits.

        `experts` are those of all steps. The caller writes the number of the step to `used` for
        each of its experts.
        """
        self.steps += steps
        self._counts.steps += steps
        self._counts.requests += experts
        self._counts.hits += experts

    def report(self) -> None:
        """Report the experts used so far to the eviction policy, in their order of use.

        Experts of one layer and pass are reported by ascending id. Afterwards `used` and `steps`
        are 0.
        """
        order = np.argsort(self.used, kind="stable")
        order = order[self.used[order] > 0]
        if order.size:
            clock, _, request, _, _ = self._cache.now
            self._cache.serve(order, clock, "none", request=request)
        self.used[:] = self.steps = 0
