"""The tables of the all-resident path by their addresses in memory, for compiled code."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.pieces import Ints
from greenroom.core.scheduler.scheduler import Scheduler

# For compiled code, int64 each: a layer's first expert; addresses of every expert's slot (the
# cache's numbers), of the step that used it last, of how often it was asked for; that of the
# tier's slot of each of the cache's; the number of this step.
SlotTables: TypeAlias = "array[int]"


class ResidentTables:
    """Steps of compiled code on a scheduler's all-resident path.

    `asked` counts the requests of each expert.
    """

    def __init__(self, scheduler: Scheduler, asked: Ints) -> None:
        self._scheduler, self._asked = scheduler, asked
        self._path: AllResident | None = None  # whose tables these are
        self._tables: SlotTables

    def steps(self, layer: int, find: Callable[[SlotTables], Sequence[int]]) -> int | None:
        """As `AllResident.step` for consecutive steps from a layer's on: `find(tables)` looks the
        slots of their experts up, notes their use in these tables, which are those of the first
        step, and returns how many experts each step had, up to the first one without a slot. How
        many steps were done; None, and nothing noted, where the scheduler has to decide."""
        if (path := self._scheduler.all_resident) is None:
            return None
        if path is not self._path:
            arrays = path.slot_of, path.used, self._asked, path.tier_slots
            self._tables = array("q", [0, *(each.ctypes.data for each in arrays), 0])
            self._path = path
        tables = self._tables
        tables[0], tables[5] = self._scheduler.view.pieces.offsets[layer], path.steps + 1
        found = find(tables)
        for experts in found:
            path.count(experts)
        return len(found)
