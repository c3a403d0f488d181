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
import torch
from torch import Tensor

from greenroom.core.layout import Copy
from greenroom.core.scheduler.resident_steps import Loads
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.store.disk import Chunk


class Copies(NamedTuple):
    """The copies of one step that were launched, between two events.

    layer:   the step's layer
    experts: how many were copied
    nbytes:  their bytes, counted as on disk
    """

    layer: int
    experts: int
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

    def launch(self, layer: int, loads: Loads, compute: Callable[[], object]) -> None:
        """Launch the copies of a step's missing experts, then its computation by `compute`."""
        table, slots = self._table, self._slots
        with table.lock:  # no other thread launches work in between
            table.follow_stream()
            if not loads.pieces:
                compute()
                return
            table.vacate(loads.slots)
            begin = self._engine.mark_time()
            try:
                nbytes = self._copy(loads)
            finally:  # also behind an error: copies of other threads come after these
                slots.mark_computed(loads.slots)
                self._host_memory.mark_read(loads.host_slots, slots.last_mark)
            end = self._engine.mark_time()
            self._launched.append(Copies(layer, len(loads.pieces), nbytes, begin, end))
            for piece, slot in zip(loads.pieces, loads.slots, strict=True):
                table.insert(piece, slot)
            compute()

    def _copy(self, loads: Loads) -> int:
        """Launch the copies of experts; return their bytes."""
        plans, parts = self._host_memory.plans, self._slots.parts
        targets, sources, nbytes = list[Tensor](), list[Tensor](), 0
        for piece, slot, host_slot in zip(*loads, strict=True):
            plan: Plan | None = plans.get(host_slot)
            if plan is None:
                plan = plans[host_slot] = self._plan(piece, host_slot)
            nbytes += plan.nbytes
            if plan.sources is not None:
                targets += parts(slot, plan.bounds)
                sources += plan.sources
                continue
            self._slots.clear(slot)
            for chunk in plan.chunks:
                self._slots.launch_write(slot, *chunk)
        if targets:  # by one call: each costs the host as much as to launch a copy
            torch._foreach_copy_(targets, sources, non_blocking=True)
        return nbytes

    def _plan(self, piece: int, host_slot: int) -> Plan:
        """Plan the copies of an expert from its slot in host memory."""
        chunks = self._chunks_of(piece)
        writes = [
            self._host_memory.slot_source(host_slot, number, chunk)
            for number, chunk in enumerate(chunks)
        ]
        nbytes = sum(chunk.length for chunk in chunks)
        ranges = self._slots.plain_ranges(writes)
        if ranges is None:
            return Plan(nbytes, writes, None)
        bounds = tuple((begin, end) for _, begin, end in ranges)
        bounds = self._bounds.setdefault(bounds, bounds)
        return Plan(nbytes, writes, [source for source, _, _ in ranges], bounds)

    def take_ended(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield (layer, experts, bytes, seconds) of copies that have ended since the last call.

        The device computes nothing meanwhile, so their seconds are stalls.
        """
        while self._launched:
            layer, experts, nbytes, begin, end = self._launched[0]
            if (seconds := self._engine.seconds_between(begin, end)) is None:
                return
            self._launched.popleft()
            yield layer, experts, nbytes, seconds
