"""Tables of resident experts' slots, whose addresses compiled code receives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.pieces import Ints
from greenroom.core.scheduler.scheduler import Scheduler

# Arguments of compiled code, int64 each: a layer's first expert; the addresses of four tables: each
# expert's slot in the cache, the step of its last use, its number of requests, and the tier's slot
# of each slot of the cache; the number of this step.
SlotTables: TypeAlias = "array[int]"


class ResidentTables:
    """Tables with which compiled code finds the slots of resident experts.

    `request_counts` has the number of requests of each expert.
    """

    def __init__(self, scheduler: Scheduler, request_counts: Ints) -> None:
        self._scheduler, self._request_counts = scheduler, request_counts
        self._path: AllResident | None = None  # that owns the tables
        self._tables: SlotTables

    def steps(self, layer: int, find: Callable[[SlotTables], Sequence[int]]) -> int | None:
        """Look up consecutive layers' chosen experts in the slot tables, while all are resident.

        `find(tables)` looks up the slots of the experts, records their use in the tables, which
        are those of the first step, and returns each step's number of experts, up to the first
        step with an expert that is not resident. Returns the number of steps served; None, and no
        record, if the scheduler has to decide. See `AllResident.step`.
        """
        if (path := self._scheduler.all_resident_path) is None:
            return None
        if path is not self._path:
            arrays = path.slot_of, path.used, self._request_counts, path.tier_slots
            self._tables = array("q", [0, *(each.ctypes.data for each in arrays), 0])
            self._path = path
        tables = self._tables
        tables[0], tables[5] = self._scheduler.view.pieces.offsets[layer], path.steps + 1
        counts = find(tables)
        for experts in counts:
            path.count(experts)
        return len(counts)
