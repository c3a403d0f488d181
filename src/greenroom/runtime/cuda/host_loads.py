"""Copies of experts from host memory to slots, in order with the computation.

The thread that computes launches them on its own stream: they begin when all is done that it has
launched before, and what it launches next finds the experts in their slots. So it waits for
nothing, and no other thread takes part. The host reads a report of later work before the next step
is served; the times of the copies are known by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from greenroom.core.layout import Copy
from greenroom.core.scheduler.resident_steps import Load
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.store.disk import Chunk


class Copies(NamedTuple):
    """The copies of one step that were launched, between two events.

    layer: the step's layer
    """

    layer: int
    nbytes: int
    begin: Any
    end: Any


class Plan(NamedTuple):
    """The copies that move an expert from a slot in host memory to any slot.

    It is made once: to make views of bytes takes longer than to launch the copies.

    chunks:  the arguments of `DeviceSlots.launch_write`
    sources: the bytes in host memory, if all copies move bytes as they are
    bounds:  their first bytes and ends in the slot; equal ones are the same object
    """

    nbytes: int
    chunks: Sequence[tuple[tuple[Copy, ...], np.ndarray, int]]
    sources: Sequence[Tensor] | None
    bounds: tuple[tuple[int, int], ...] = ()


class HostLoads:
    """Copies of experts from host memory to slots, launched by the thread that computes.

    Callers hold one lock.
    """

    def __init__(
        self,
        chunks_of: Callable[[int], Sequence[Chunk]],
        slots: DeviceSlots,
        host_memory: HostMemory,
        table: SlotTable,
    ) -> None:
        """Connect the memories; `chunks_of(expert)` returns an expert's chunks."""
        self._chunks_of, self._slots, self._host_memory = chunks_of, slots, host_memory
        self._table, self._engine = table, table.engine
        self._launched = deque[Copies]()  # whose times are not counted yet
        self._bounds: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}

    def launch(self, layer: int, loads: Sequence[Load], compute: Callable[[], object]) -> None:
        """Launch the copies of a step's missing experts, then its computation by `compute`."""
        table, slots = self._table, self._slots
        numbers = [load.slot for load in loads]
        with table.lock:  # no other thread launches work in between
            table.follow_stream()
            table.vacate(numbers)
            begin, nbytes = self._engine.mark_time(), 0
            try:
                for load in loads:
                    nbytes += self._copy(load)
            finally:  # also behind an error: copies of other threads come after these
                slots.mark_computed(numbers)
                self._host_memory.mark_read([load.host_slot for load in loads], slots.last_mark)
            self._launched.append(Copies(layer, nbytes, begin, self._engine.mark_time()))
            for load in loads:
                table.insert(load.piece, load.slot)
            compute()

    def _copy(self, load: Load) -> int:
        """Launch the copies of an expert; return their bytes."""
        plan: Plan | None = self._host_memory.plans.get(load.host_slot)
        if plan is None:
            plan = self._host_memory.plans[load.host_slot] = self._plan(load)
        if plan.sources is not None:
            targets = self._slots.parts(load.slot, plan.bounds)
            for target, source in zip(targets, plan.sources, strict=True):
                target.copy_(source, non_blocking=True)
            return plan.nbytes
        self._slots.clear(load.slot)
        for chunk in plan.chunks:
            self._slots.launch_write(load.slot, *chunk)
        return plan.nbytes

    def _plan(self, load: Load) -> Plan:
        """Plan the copies of an expert from its slot in host memory."""
        chunks = self._chunks_of(load.piece)
        writes = [
            self._host_memory.slot_source(load.host_slot, number, chunk)
            for number, chunk in enumerate(chunks)
        ]
        nbytes = sum(chunk.length for chunk in chunks)
        ranges = self._slots.plain_ranges(writes)
        if ranges is None:
            return Plan(nbytes, writes, None)
        bounds = tuple((begin, end) for _, begin, end in ranges)
        bounds = self._bounds.setdefault(bounds, bounds)
        return Plan(nbytes, writes, [source for source, _, _ in ranges], bounds)

    def take_ended(self) -> Iterator[tuple[int, int, float]]:
        """Yield (layer, bytes, seconds) of the copies that have ended since the last call.

        The device computes nothing meanwhile, so their seconds are stalls.
        """
        while self._launched:
            layer, nbytes, begin, end = self._launched[0]
            if (seconds := self._engine.seconds_between(begin, end)) is None:
                return
            self._launched.popleft()
            yield layer, nbytes, seconds
