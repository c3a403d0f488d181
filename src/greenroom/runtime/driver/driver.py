"""The driver: turns the scheduler's actions into reads and computation, under one lock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from greenroom.core.events import (
    HOST,
    Action,
    Cancelled,
    Computed,
    ComputeGroup,
    Event,
    Failed,
    Finish,
    Landed,
    Move,
    Predicted,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import StoreError
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.driver.copier import Copier, Failure, Store
from greenroom.runtime.driver.fair_lock import FairLock
from greenroom.runtime.driver.host_worker import HostWorker, Job
from greenroom.runtime.driver.meter import Meter
from greenroom.runtime.driver.predictions import Predictions
from greenroom.runtime.driver.timeline import COMPUTE, Timeline
from greenroom.runtime.slots.resident_tables import ResidentTables, SlotTables
from greenroom.runtime.slots.tier import Tier

ComputeExperts = Callable[..., None]  # (experts, slots), and the part where groups have one
PrepareHostJob = Callable[[np.ndarray, np.ndarray], Job]  # (experts, slots of host memory)


class Driver:
    """One model's experts at run time. Steps are served one after another.

    `foresight` predicts, unless every expert has a slot; `guard` stops what does not pay;
    `host_memory` is the memory between two links.

    An exception in the midst of a decision, in whichever thread, leaves it unknown what is where:
    the driver is broken, whoever waits is told so (ClosedError), and so is everybody after.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        slots: Tier,
        *,
        foresight: Foresight | None = None,
        guard: Guard | None = None,
        links: tuple[str, ...] = ("disk -> host",),
        host_memory: HostMemory | None = None,
    ) -> None:
        self.scheduler, self.slots = scheduler, slots
        self.pieces = pieces = scheduler.view.pieces
        self.predictions = Predictions(foresight, guard, lambda: self.all_resident, self._tell)
        self.meter = Meter.for_lanes(scheduler.view.lanes)
        self.request_counts = np.zeros(pieces.experts, np.int64)  # requests of each expert
        self.miss_counts = np.zeros(pieces.layers, np.int64)  # misses of each layer
        self._tables = ResidentTables(scheduler, self.request_counts)
        self.capacity_range = scheduler.capacity, scheduler.capacity  # least and most so far
        self.timeline: Timeline | None = None
        self.links, self._store, self.host_memory = links, store, host_memory
        self._orders = ActionQueue()
        self._changed = self._orders.changed
        self._one_step = FairLock()
        self._error: Failure | None = None  # of the step under way
        self._overlapped_work: Callable[[], None] | None = None
        self._pass, self._layer = -1, pieces.layers
        self._request, self._prefill = 0, False
        self._begun: tuple[float, float, int] | None = None  # of the pass: when, stalls, tokens
        self._starts: dict[tuple[int, int], float] = {}  # of chunks on (link, lane), for a timeline
        self._host = HostWorker(self.meter) if any(o.uses_host for o in scheduler.options) else None
        lanes = scheduler.view.lanes
        self._copier = Copier(store, slots, lanes, self._delivered, host_memory)

    def begin_pass(self, at: PassStart) -> None:
        """A pass begins; `at.request` says of which prompt."""
        with self._changed:
            self._request, self._prefill = at.request, at.prefill
            self._begun = time.perf_counter(), self.meter.stall_s, at.tokens
        self.predictions.begin(at, self._orders.closed)

    @property
    def all_resident(self) -> bool:
        """Has every expert a slot?"""
        return self.scheduler.capacity >= self.pieces.experts

    def end_pass(self) -> None:
        """The pass is over, or was given up."""
        if self._begun is None:
            return
        begun, stalls, tokens = self._begun
        self._begun, now = None, time.perf_counter()
        seconds, waited = now - begun, self.meter.stall_s - stalls
        if not self._prefill:
            self.meter.add_decode(seconds, waited)
        if self.timeline is not None:
            self.timeline.span("passes", "prompt" if self._prefill else "token", begun, now)
        self.predictions.end(self._prefill, seconds, waited, tokens)

    def announce_routing(self, layer: int, experts: np.ndarray) -> None:
        """A layer's router has chosen these (ids within it, ascending); its step is yet to come.

        They begin to come, where slots may be on loan.
        """
        if not self._orders.closed:
            first = self.pieces.offsets[layer]
            self._tell(Predicted(layer, experts + first, certain=True))

    def interrupt(self) -> None:
        """Nobody waits for the pass under way: its step raises Interrupted, and so do those that
        follow, until `resume`. What it has asked for is not fetched any more."""
        self._orders.interrupt()

    def resume(self) -> None:
        """Steps are served again."""
        self._orders.interrupted = False

    def step(
        self,
        layer: int,
        experts: np.ndarray,
        compute: ComputeExperts,
        rows: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        *,
        tail_weights: np.ndarray | None = None,
        observe_routing: Callable[[bool], LayerRouting] | None = None,
        overlapped_work: Callable[[], None] | None = None,
        prepare_host_job: PrepareHostJob | None = None,
    ) -> None:
        """Have `compute(experts, slots)` called on every expert of a step once, in groups; of split
        experts `compute(experts, slots, part)` on every part, the top before the bottom.

        experts: ids within the layer, ascending, int64
        rows, weights: the tokens that chose each, and the sums of their gate weights
        tail_weights: gate weight of each expert and of the ranks below, where misses may be
            approximated
        observe_routing: makes the observation for predictors, with or without the router's inputs
        overlapped_work: called at most once, when the step would otherwise wait
        prepare_host_job: makes a job of (experts, slots) for the host processor's thread

        StoreError where an expert cannot be read, DeviceError where the device does not take it.
        The cache stays usable, and so it does after an exception in `compute`.
        """
        if experts.size == 0:
            return
        first = self.pieces.offsets[layer]
        with self._one_step:
            self._enter(wanted=True)
            self._come_to(layer)
            pieces = experts + first
            self.request_counts[pieces] += 1
            path = self.scheduler.all_resident
            slots = None if path is None else path.step(pieces)
            if slots is not None:
                begin = time.perf_counter()
                compute(experts, slots)
                if self.timeline is not None:
                    self.timeline.group(layer, ComputeGroup(pieces, slots), begin)
                return
            self._overlapped_work, self._error = overlapped_work, None
            misses = self.scheduler.view.misses
            try:
                self._tell(Routed(
                    self._pass, layer, pieces, self._request, rows, weights, self._prefill,
                    tail_weights, device_only=prepare_host_job is None,
                ))  # fmt: skip
                self.miss_counts[layer] += self.scheduler.view.misses - misses
                self.predictions.routed(observe_routing)
                order = self._compute(layer, compute, prepare_host_job)
            except BaseException:
                self._abandon()
                raise
            if order.failed >= 0:
                raise self._error or StoreError(f"expert {order.failed} could not be read")

    def _compute(
        self, layer: int, compute: ComputeExperts, prepare_host_job: PrepareHostJob | None
    ) -> Finish:
        """Have every group of the step computed, as they are ordered; how it ends."""
        first = self.pieces.offsets[layer]
        in_parts = self.scheduler.parts
        while isinstance(order := self._next_order(), ComputeGroup):
            if order.device == HOST:
                self._to_host(order, prepare_host_job)
                continue
            begin = time.perf_counter()
            compute(order.experts - first, order.slots, *([order.part] if in_parts else []))
            if not self._prefill:
                self.meter.computed_s += time.perf_counter() - begin
            if self.timeline is not None:
                self.timeline.group(layer, order, begin)
            self._tell(Computed(order.device))
        return order

    def _to_host(self, order: ComputeGroup, prepare_host_job: PrepareHostJob | None) -> None:
        """Have the host's processor compute a group, while this thread goes on."""
        assert self._host is not None
        assert prepare_host_job is not None
        layer, begin = self._layer, time.perf_counter()
        first = self.pieces.offsets[layer]

        def done(error: BaseException | None) -> None:
            if self.timeline is not None:
                self.timeline.group(layer, order, begin)
            with self._changed:
                if error is not None:
                    self._orders.host_error = self._orders.host_error or error
                    self._changed.notify_all()
                elif self._orders.broken is None:
                    with contextlib.suppress(BaseException):  # it says so to everybody who waits
                        self._carry_out(Computed(HOST))

        self._host.start(prepare_host_job(order.experts - first, order.slots), done)

    def resident_steps(
        self, layers: Sequence[int], find: Callable[[SlotTables], Sequence[int]]
    ) -> int | None:
        """Steps without a decision for consecutive layers: `find` (see `ResidentTables`) also
        computes them, until one that has to be a `step`. How many steps were done; None where
        nothing was."""
        if self.timeline is not None:
            return None
        with self._one_step:
            self._enter(wanted=True)
            done = self._tables.steps(layers[0], find)
            if done:
                for layer in layers[:done]:
                    self._come_to(layer)
            return done

    def send(self, event: Event) -> None:
        """Tell the scheduler something between two steps."""
        with self._one_step:
            self._enter()
            self._tell(event)

    def resize(self, capacity: int) -> None:
        """Change the number of slots between steps; returns when it is done."""
        with self._one_step:
            self._enter()
            if capacity == self.scheduler.capacity:
                return
            if capacity > self.slots.capacity:
                self.slots.trim(capacity)
            self._tell(Resized(capacity))
            with self._changed:  # what is being prefetched lands first
                while self.scheduler.capacity != capacity:
                    self._orders.wait()
        least, most = self.capacity_range
        self.capacity_range = min(least, capacity), max(most, capacity)
        self.predictions.resized()

    def _come_to(self, layer: int) -> None:
        """A layer's step; one that does not come after the last one's begins another pass."""
        self._pass += layer <= self._layer
        self._layer = layer
        self.meter.passes = self._pass + 1

    def _enter(self, wanted: bool = False) -> None:
        """A step or a resize begins; a step whose leaving was interrupted is left now."""
        self._orders.check_open()
        if self.scheduler.step is not None or self._orders:
            self._abandon()
        if wanted:
            self._orders.check_wanted()

    def _tell(self, event: Event) -> None:
        with self._changed:
            self._carry_out(event)

    def _carry_out(self, event: Event) -> None:
        """Do what the scheduler says to an event; with the lock held."""
        now = time.perf_counter()
        try:
            for action in self.scheduler.on(event, now):
                self._do(action, now)
        except BaseException as error:
            self._orders.break_off(error)
            raise

    def _do(self, action: Action, now: float) -> None:
        match action:
            case StartChunk():
                if action.first_of_piece and action.slot >= 0:
                    pool, number = self.slots.at(action.slot)
                    pool.clear(number)
                if action.copy_slot >= 0:
                    (pool, number), (of, copy) = map(self.slots.at, (action.slot, action.copy_slot))
                    layer = int(self.pieces.layer[action.piece])
                    pool.fill(number, of.bytes(copy), layer)
                self.meter.links[action.link].starts(now)
                self._starts[action.link, action.lane] = now
                self._copier.start(action)
            case ComputeGroup() | Finish():
                self._orders.put(action)
            case Move():
                (pool, number), (_, target) = map(self.slots.at, (action.source, action.target))
                pool.move(number, target)
            case Trim():
                self.slots.trim(action.capacity)
                self._changed.notify_all()

    def _next_order(self) -> ComputeGroup | Finish:
        if self._overlapped_work is not None and not self._orders:
            work, self._overlapped_work = self._overlapped_work, None
            work()
        with self._changed:
            if not self._orders:
                begin, cause = time.perf_counter(), self._cause()
                while not self._orders:
                    self._orders.check_wanted()
                    self._orders.wait()
                end = time.perf_counter()
                self.meter.stalls[cause] += end - begin
                if self.timeline is not None:
                    self.timeline.span(COMPUTE, f"stall: {cause}", begin, end, layer=self._layer)
            return self._orders.popleft()

    def _cause(self) -> str:
        """Why there is nothing to compute; one of `meter.CAUSES`."""
        step = self.scheduler.step
        if self._prefill or step is None:
            return "prefill"
        return "late" if step.late & step.missing.keys() else "miss"

    def _delivered(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        """A chunk has arrived, or could not. In a thread of the copier: what fails here must reach
        those who wait."""
        with self._changed:
            if self._orders.broken is None:
                try:
                    self._arrived(action, nbytes, error)
                except BaseException as broken:
                    self._orders.break_off(broken)

    def _arrived(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        now = time.perf_counter()
        self.meter.links[action.link].ends(now, nbytes)
        if self.timeline is not None:
            began = self._starts[action.link, action.lane]
            self.timeline.chunk(self.links[action.link], action, began, now)
        if error is None:
            self._carry_out(Landed(action.lane, action.piece, action.link))
        else:
            step = self.scheduler.step
            if step is not None and action.piece in step.missing:
                self._error = self._error or error
            self._carry_out(Failed(action.lane, action.piece, action.link))

    def _abandon(self) -> None:
        """Leave the step; what is moving lands first, since a read cannot be recalled, and what the
        host computes ends."""
        if self._host is not None:
            self._host.wait()
        with self._changed:
            self._orders.host_error = None
            self._orders.clear()
            if self.scheduler.step is not None and self._orders.broken is None:
                self._carry_out(Cancelled())
                while not self._orders and self._orders.broken is None:
                    self._changed.wait()
            self._orders.clear()

    def close(self) -> None:
        """End the threads and free the slots; a step under way ends first."""
        with self._one_step:
            if not self._orders.closed:
                self._orders.closed = True
                self._copier.close()
                if self._host is not None:
                    self._host.close()
                self._store.close()
                self.slots.close()
                if self.host_memory is not None:
                    self.host_memory.close()
