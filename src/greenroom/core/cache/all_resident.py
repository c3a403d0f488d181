"""The all-resident path: steps of which every expert has a slot, past the event machine.

LRU remembers nothing but the order of use while it evicts nothing, so the policy can be told of
that order later, when the cache shrinks. Told of every step, it takes ten microseconds of a layer's
thirty, and five times as many on a processor cache that the weights have just emptied.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.pieces import Ints

# For compiled code, int64 each: a layer's first expert; addresses of every expert's slot (the
# cache's numbers), of the step that used it last, of how often it was asked for; that of the
# tier's slot of each of the cache's; the number of this step.
Tables: TypeAlias = "array[int]"


class AllResident:
    """The order in which the experts of a cache were used, since this was made."""

    def __init__(self, placement: Placement, counts: Counts) -> None:
        self._placement, self._cache, self._counts = placement, placement.cache, counts
        self._steps = 0
        self._used = np.zeros(self._cache.state.slot_of.size, np.int64)  # in which step; 0: none
        self._addresses: Tables | None = None

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
        slots: Ints = self._cache.state.slot_of[experts]
        if slots.min() < 0:
            return None
        self._steps += 1
        self._used[experts] = self._steps
        self._count(experts.size)
        place: Ints = self._placement.place[slots]
        return place

    def compiled_step(self, first: int, asked: Ints, find: Callable[[Tables], int]) -> bool:
        """As `step`, for compiled code: `find(tables)` looks the slots of a step's experts up,
        notes their use in these tables and in `asked`, and returns how many there were; 0 where one
        has no slot. `first` is the layer's first expert."""
        tables = self._tables(asked)
        tables[0] = first
        if not (found := find(tables)):
            return False
        self._steps += 1
        self._count(found)
        return True

    def compiled_steps(self, asked: Ints, find: Callable[[Tables], Sequence[int]]) -> int:
        """As `compiled_step` for consecutive steps: `find` knows their layers' first experts, and
        returns how many experts each step had, up to the first one without a slot. The tables are
        those of the first step. How many steps were done."""
        found = find(self._tables(asked))
        for experts in found:
            self._steps += 1
            self._count(experts)
        return len(found)

    def tell(self) -> None:
        """Tell the policy what was used, in this order: by step, and by id within one."""
        order = np.argsort(self._used, kind="stable")
        order = order[self._used[order] > 0]
        if order.size:
            now = self._cache.now
            self._cache.serve(order, now.clock, "none", request=now.request)
        self._used[:] = self._steps = 0

    def _tables(self, asked: Ints) -> Tables:
        if self._addresses is None:
            arrays = self._cache.state.slot_of, self._used, asked, self._placement.place
            self._addresses = array("q", [0, *(each.ctypes.data for each in arrays), 0])
        self._addresses[5] = self._steps + 1
        return self._addresses

    def _count(self, experts: int) -> None:
        """A step has found all of its experts."""
        self._counts.steps += 1
        self._counts.requests += experts
        self._counts.hits += experts
