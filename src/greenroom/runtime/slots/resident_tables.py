"""Tables in which compiled code finds the cache slots of resident experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.compiling.compile_cache import jit
from greenroom.core.compiling.steady_call import SteadyCall
from greenroom.core.pieces import Ints
from greenroom.core.scheduler.scheduler import Scheduler


class SlotTables(NamedTuple):
    """Addresses of the int64 tables with all experts' slots.

    first:     number of a layer's first expert in the next three tables
    slot_of:   each expert's slot in the cache, negative if it is not loaded
    last_used: the step of each expert's last use
    requests:  each expert's number of uses
    memory:    the memory slot of each slot of the cache
    step:      the number of this step

    The fields are those of the structure `SlotTables` in native/router.hpp.
    """

    first: int
    slot_of: int
    last_used: int
    requests: int
    memory: int
    step: int


class ResidentTables:
    """Tables in which compiled code finds the cache slots of resident experts.

    `request_counts` has how often each expert was used; compiled code adds to these numbers.
    """

    def __init__(self, scheduler: Scheduler, request_counts: Ints) -> None:
        self._scheduler, self._request_counts = scheduler, request_counts
        self._path: AllResident | None = None  # that owns the tables
        self._addresses: tuple[int, int, int, int]
        self._layers: Sequence[int] = ()  # those of the next three
        self._first = self._end = self._rank = np.zeros((0, 1), np.int64)

    def count(self, pieces: Ints) -> None:
        """Count a use of each of a step's experts."""
        _add(self._request_counts, pieces)

    def serve(self, steps: Sequence[Ints]) -> int | None:
        """Record steps of different layers, each step's experts, if all are resident.

        Returns the number of steps; None, and counts nothing, if the scheduler has to decide.
        """
        if (path := self._scheduler.resident_steps.path) is None:
            return None
        pieces = np.concatenate(steps)
        if not path.serve(pieces, [experts.size for experts in steps]):
            return None
        self._request_counts[pieces] += 1
        return len(steps)

    @property
    def is_open(self) -> bool:
        """Tell whether steps of resident experts need no decision: each expert has a slot."""
        return self._scheduler.resident_steps.path is not None

    def record_use(self, chosen: NDArray[np.int32], layers: Sequence[int]) -> list[int]:
        """Record the use of experts by the next steps, within `steps`; return the number of each.

        `chosen` are ids within a layer, [steps, top_k], of these `layers`. Those from a layer's
        number of experts on are of no expert.
        """
        path = self._scheduler.resident_steps.path
        assert path is not None
        if layers is not self._layers:  # arrays of a few numbers cost a microsecond each
            offsets, self._layers = self._scheduler.view.pieces.offsets, layers
            self._first = np.array([offsets[layer] for layer in layers])[:, None]
            self._end = np.array([offsets[layer + 1] for layer in layers])[:, None]
            self._rank = np.arange(1, len(layers) + 1)[:, None]
        pieces, rank = chosen + self._first, self._rank + path.steps
        if (mask := pieces < self._end).all():
            path.used[pieces] = rank
            self._request_counts[pieces] += 1
            return [chosen.shape[1]] * len(chosen)
        path.used[pieces[mask]] = np.broadcast_to(rank, mask.shape)[mask]
        self._request_counts[pieces[mask]] += 1
        numbers: list[int] = mask.sum(axis=1).tolist()
        return numbers

    def steps(self, layer: int, find: Callable[[SlotTables], Sequence[int]]) -> int | None:
        """Compute consecutive MoE layers by `find`, while all chosen experts are resident.

        `find(tables)` gets the tables of the first layer, `layer`. It looks up the slots of the
        chosen experts, records their use in the tables, and computes the layers up to the first one
        with an expert that is not resident. It returns each layer's number of experts.

        Returns the number of layers computed; None, without a call of `find`, if the scheduler has
        to decide (see `AllResident`).
        """
        if (path := self._scheduler.resident_steps.path) is None:
            return None
        if path is not self._path:
            self._addresses = (
                path.slot_of.ctypes.data,
                path.used.ctypes.data,
                self._request_counts.ctypes.data,
                path.tier_slots.ctypes.data,
            )
            self._path = path
        first = self._scheduler.view.pieces.offsets[layer]
        counts = find(SlotTables(first, *self._addresses, path.steps + 1))
        path.count(sum(counts), len(counts))
        return len(counts)


@jit(_nrt=False)
def add_uses(counts: Ints, pieces: Ints) -> None:
    """Count a use of each expert of a step; NumPy takes several times as long."""
    for piece in pieces:
        counts[piece] += 1


_add = SteadyCall(add_uses)
