"""Tables in which compiled code finds the cache slots of resident experts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.pieces import Ints
from greenroom.core.scheduler.scheduler import Scheduler

# Arguments of compiled code, int64 each: the id of a layer's first expert; the addresses of four
# tables (each expert's slot in the cache, the step of its last use, its number of requests, and the
# memory slot of each slot of the cache); the number of this step.
SlotTables: TypeAlias = "array[int]"


class ResidentTables:
    """Tables in which compiled code finds the cache slots of resident experts.

    `request_counts` has how often each expert was used; compiled code adds to these numbers.
    """

    def __init__(self, scheduler: Scheduler, request_counts: Ints) -> None:
        self._scheduler, self._request_counts = scheduler, request_counts
        self._path: AllResident | None = None  # that owns the tables
        self._tables: SlotTables

    def steps(self, layer: int, find: Callable[[SlotTables], Sequence[int]]) -> int | None:
        """Compute consecutive MoE layers by `find`, while all chosen experts are resident.

        `find(tables)` gets the tables of the first layer, `layer`. It looks up the slots of the
        chosen experts, records their use in the tables, and computes the layers up to the first one
        with an expert that is not resident. It returns each layer's number of experts.

        Returns the number of layers computed; None, without a call of `find`, if the scheduler has
        to decide (see `AllResident`).
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
