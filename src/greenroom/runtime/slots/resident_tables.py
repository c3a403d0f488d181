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
Tables: TypeAlias = "array[int]"


class ResidentTables:
    """Steps of compiled code on a scheduler's all-resident path.

    `asked` counts the requests of each expert.
    """

    def __init__(self, scheduler: Scheduler, asked: Ints) -> None:
        self._scheduler, self._asked = scheduler, asked
        self._path: AllResident | None = None  # whose tables these are
        self._tables: Tables

    def step(self, layer: int, find: Callable[[Tables], int]) -> bool:
        """As `AllResident.step`: `find(tables)` looks the slots of a step's experts up, notes their
        use in these tables, and returns how many there were; 0 where one has no slot. False, and
        nothing noted, where the scheduler has to decide."""
        if (path := self._current()) is None:
            return False
        self._tables[0] = self._scheduler.pieces.offsets[layer]
        if not (found := find(self._tables)):
            return False
        path.count(found)
        return True

    def steps(self, find: Callable[[Tables], Sequence[int]]) -> int | None:
        """As `step` for consecutive steps: `find` knows their layers' first experts, and returns
        how many experts each step had, up to the first one without a slot. The tables are those of
        the first step. How many steps were done; None without a path."""
        if (path := self._current()) is None:
            return None
        found = find(self._tables)
        for experts in found:
            path.count(experts)
        return len(found)

    def _current(self) -> AllResident | None:
        """The path that there is now; its tables are those of the next step."""
        path = self._scheduler.all_resident
        if path is not None:
            if path is not self._path:
                arrays = path.slot_of, path.used, self._asked, path.place
                self._tables = array("q", [0, *(each.ctypes.data for each in arrays), 0])
                self._path = path
            self._tables[5] = path.steps + 1
        return path
