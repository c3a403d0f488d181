"""Copies of experts from host memory to slots, in order with the computation.

The thread that computes launches them on its own stream: they begin when all is done that it has
launched before, and what it launches next finds the experts in their slots. So it waits for
nothing, and no other thread takes part. The host reads a report of later work before the next step
is served; the times of the copies are known by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from greenroom.core.pieces import Ints
from greenroom.core.scheduler.resident_steps import Loads
from greenroom.runtime.cuda.copy_plans import UNPLANNED, Plan
from greenroom.runtime.cuda.copy_trial import CopyTrial
from greenroom.runtime.cuda.engine import Mark
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.store.disk import Chunk

MOST_COUNTED = 4096  # steps of a pass whose copies are counted


class Copies(NamedTuple):
    """The copies of one step that were launched, between two events.

    layer:     the step's layer
    loads:     the experts that were copied
    nbytes:    their bytes, counted as on disk
    by_kernel: a kernel copies them
    """

    layer: int
    loads: Loads
    nbytes: int
    by_kernel: bool
    begin: Any
    end: Any


class CopyList(Protocol):
    """A list of copies in host memory, for one launch.

    numbers: see `CopyPlans.load`
    """

    numbers: Ints

    def start(self) -> None:
        """Launch the copies."""


class LoadedLayer(Protocol):
    """Launches for the experts that a token misses in a layer.

    copies:    a list in host memory for a kernel that copies; None: there is no such kernel
    changes:   the list of the table's changes in host memory, which `compute_loaded` writes
    on_device: a context in which launches go to the device of the slots
    """

    copies: CopyList | None
    changes: Ints
    on_device: AbstractContextManager[Any]

    def follow_stream(self) -> None:
        """Put changes of slots, and what is launched next, on the calling thread's stream."""

    def compute_loaded(self, handed_over: bool = False) -> None:
        """Launch the computation of the experts that were missing.

        handed_over: `changes` has the table's changes
        """


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
        if host_memory.kernels_can_read:
            table.listed_copies = host_memory.plans.most
        self._trial = CopyTrial()
        # Whose times are not counted yet. Nobody counts where a decoder is called by itself; all
        # but the latest have ended, since a report of later work was read.
        self._launched = deque[Copies](maxlen=MOST_COUNTED)
        host_memory.mark_of_copies = self._mark_of
        self._bounds: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}

    def launch(
        self,
        layer: int,
        loads: Loads,
        launches: LoadedLayer,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Launch the copies of a step's missing experts, their computation, and what is `then`."""
        with self._table.lock, launches.on_device:  # no other thread launches work in between
            launches.follow_stream()
            by_kernel = loads.size > 0 and self._launch_copies(layer, loads, launches)
            launches.compute_loaded(by_kernel)
            if then is not None:
                then()

    def _launch_copies(self, layer: int, loads: Loads, launches: LoadedLayer) -> bool:
        """Launch the copies; tell whether a kernel copies, so that changes are handed over."""
        engine = self._engine
        begin = engine.mark_time()
        try:
            nbytes, by_kernel = self._copy(loads, launches)
            copies = Copies(layer, loads, nbytes, by_kernel, begin, engine.mark_time())
            self._launched.append(copies)
        except BaseException:  # some copies may be on their way to slots of no expert
            self._table.vacate(loads.slots)  # first: `load` enters experts before their copies
            self._slots.mark_computed(loads.slots)
            self._host_memory.mark_read(loads.host_slots, self._slots.last_mark)
            raise
        return by_kernel

    def _mark_of(self, host_slot: int) -> Mark:
        """Return the event behind the last copies that read a slot; None if they have ended."""
        for copies in reversed(tuple(self._launched)):  # which another thread changes
            if host_slot in copies.loads.host_slots:
                return copies.end
        return None

    def _copy(self, loads: Loads, launches: LoadedLayer) -> tuple[int, bool]:
        """Launch the copies of experts, and enter these in the table.

        Returns their bytes, and whether a kernel copies them."""
        copies, memory = launches.copies, self._host_memory
        if copies is not None and memory.kernels_can_read and self._trial.next_by_kernel():
            arguments = (
                loads.numbers, self._table.entries, self._slots.addresses, copies.numbers,
                launches.changes,
            )  # fmt: skip
            load = memory.plans.load
            if (nbytes := load(*arguments)) == UNPLANNED:
                for piece, host_slot in zip(loads.pieces, loads.host_slots, strict=True):
                    self._plan_of(piece, host_slot)
                nbytes = load(*arguments)
            if nbytes >= 0:
                self._table.forget_transfers(loads.numbers[1])
                copies.start()  # the last ones have run: this token's report came after them
                return nbytes, True
        self._table.write_changes()  # which an interrupt may have left
        self._table.vacate(loads.slots)
        nbytes = self._copy_each(loads)
        self._table.insert(loads.pieces, loads.slots)
        return nbytes, False

    def _copy_each(self, loads: Loads) -> int:
        """Launch the copies of experts one by one; return their bytes."""
        parts, targets, sources, nbytes = self._slots.parts, list[Tensor](), list[Tensor](), 0
        for piece, slot, host_slot in loads.numbers.T.tolist():
            each, chunks, views, bounds = self._plan_of(piece, host_slot)
            nbytes += each
            if views is not None:
                targets += parts(slot, bounds)
                sources += views
                continue
            self._slots.clear(slot)
            for chunk in chunks:
                self._slots.launch_write(slot, *chunk)
        if targets:  # by one call: each costs the host as much as to launch a copy
            torch._foreach_copy_(targets, sources, non_blocking=True)
        return nbytes

    def _plan_of(self, piece: int, host_slot: int) -> Plan:
        """Return the plan of an expert's copies from its slot in host memory."""
        plans = self._host_memory.plans
        if (plan := plans.get(host_slot)) is None:
            plan = self._plan(piece, host_slot)
            plans.add(host_slot, plan)
        return plan

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
            layer, loads, nbytes, by_kernel, begin, end = self._launched[0]
            if (seconds := self._engine.seconds_between(begin, end)) is None:
                return
            self._launched.popleft()
            self._trial.add(by_kernel, nbytes, seconds)
            yield layer, loads.size, nbytes, seconds
