"""The all-resident path: steps of which every expert has a slot, past the event machine.

LRU remembers nothing but the order of use while it evicts nothing, so the policy can be told of
that order later, when the cache shrinks. Told of every step, it takes ten microseconds of a layer's
thirty, and five times as many on a processor cache that the weights have just emptied.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints


class AllResident:
    """The order in which the experts of a cache were used, since this was made.

    slot_of: the cache's slot of each expert, -1 where it has none
    place:   the tier's slot for each of the cache's
    used:    the step that used each expert last, counted from 1; 0: none has
    steps:   how many there were
    """

    def __init__(self, placement: Placement, counts: Counts) -> None:
        self._cache, self._counts = placement.cache, counts
        self.slot_of, self.tier_slots = placement.cache.state.slot_of, placement.tier_slots
        self.used = np.zeros(self.slot_of.size, np.int64)
        self.steps = 0

    @staticmethod
    def of(placement: Placement, counts: Counts) -> AllResident | None:
        """The path for a cache that evicts nothing, under a policy that may be told later."""
        cache = placement.cache
        if cache.policy.name != "lru" or cache.capacity < cache.state.slot_of.size:
            return None
        return AllResident(placement, counts)

    def step(self, experts: Ints) -> Ints | None:
        """The tier's slots of a step's experts (ascending): the step is over with this, and they
        are to be computed. None, and nothing noted, where one of them has no slot."""
        slots: Ints = self.slot_of[experts]
        if slots.min() < 0:
            return None
        self.used[experts] = self.steps + 1
        self.count(experts.size)
        place: Ints = self.tier_slots[slots]
        return place

    def count(self, experts: int) -> None:
        """A step has found all of its experts, and `used` says so."""
        self.steps += 1
        self._counts.steps += 1
        self._counts.requests += experts
        self._counts.hits += experts

    def tell(self) -> None:
        """Tell the policy what was used, in this order: by step, and by id within one."""
        order = np.argsort(self.used, kind="stable")
        order = order[self.used[order] > 0]
        if order.size:
            clock, _, request, _ = self._cache.now
            self._cache.serve(order, clock, "none", request=request)
        self.used[:] = self.steps = 0
