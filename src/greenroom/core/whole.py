"""A cache with room for every piece: where a step's are there, nothing is to be decided, and only
the order of use is kept.

LRU remembers nothing but that order while it evicts nothing, so it can be told of it later, when
the cache shrinks. Told of every step, it takes ten microseconds of a layer's thirty, five times as
many on a cache that the weights have just emptied.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np

from greenroom.core.cache import Cache
from greenroom.core.pieces import Ints

# For compiled code, int64 each: a layer's first piece; addresses of every piece's slot (the
# cache's numbers), of the step that used it last, of how often it was asked for; that of the
# tier's slot of each of the cache's; the number of this step.
Tables: TypeAlias = "array[int]"


class Whole:
    """The order in which the pieces of a cache were used, since this was made."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._steps = 0
        self._used = np.zeros(cache.state.slot_of.size, np.int64)  # in which step; 0: in none
        self._addresses: Tables | None = None

    @staticmethod
    def of(cache: Cache) -> Whole | None:
        """One for a cache that will evict nothing, under a policy to which this does no harm."""
        if cache.policy.name != "lru" or cache.capacity < cache.state.slot_of.size:
            return None
        return Whole(cache)

    def use(self, pieces: Ints) -> Ints | None:
        """The slots of a step's pieces (the cache's numbers); None, and nothing noted, where one of
        them has none."""
        slots: Ints = self._cache.state.slot_of[pieces]
        if slots.min() < 0:
            return None
        self._steps += 1
        self._used[pieces] = self._steps
        return slots

    def tables(self, asked: Ints, place: Ints) -> Tables:
        """The words that the next step's use is noted by; `noted` says that it has been."""
        if self._addresses is None:
            arrays = self._cache.state.slot_of, self._used, asked, place
            self._addresses = array("q", [0, *(each.ctypes.data for each in arrays), 0])
        self._addresses[5] = self._steps + 1
        return self._addresses

    def noted(self) -> None:
        """A step's use has been noted in the tables."""
        self._steps += 1

    def tell(self) -> None:
        """Tell the policy what was used, in this order: by step, and by id within one."""
        order = np.argsort(self._used, kind="stable")
        order = order[self._used[order] > 0]
        if order.size:
            now = self._cache.now
            self._cache.serve(order, now.clock, "none", request=now.request)
        self._used[:] = self._steps = 0
