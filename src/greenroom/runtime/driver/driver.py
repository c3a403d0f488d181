"""The driver, which executes the scheduler's actions as reads and computation of experts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from greenroom.core.cache.scope import Scope
from greenroom.core.events import (
    HOST,
    Action,
    Cancelled,
    Computed,
    ComputeGroup,
    Event,
    Finish,
    Move,
    Resized,
    Routed,
    StartChunk,
    Trim,
)  # fmt: skip
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.interrupts import hold_interrupts
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.host_loads import HostLoads
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.driver.copier import Copier, Deliveries, Failure, Store, read_error
from greenroom.runtime.driver.device_steps import DeferredSteps, DeviceSteps
from greenroom.runtime.driver.fair_lock import FairLock
from greenroom.runtime.driver.host_worker import HostWorker, Job
from greenroom.runtime.driver.meter import Meter, stall_cause
from greenroom.runtime.driver.ordered_copies import OrderedCopies
from greenroom.runtime.driver.passes import Passes
from greenroom.runtime.driver.predictions import Predictions
from greenroom.runtime.driver.slot_changes import SlotChanges
from greenroom.runtime.driver.timeline import Timeline
from greenroom.runtime.slots.resident_tables import ResidentTables, SlotTables
from greenroom.runtime.slots.tier import Tier

ComputeExperts = Callable[..., None]  # (experts, slots), or (experts, slots, part) of split experts
Observe = Callable[[bool], LayerRouting]  # see `step`
PrepareHostJob = Callable[[np.ndarray, np.ndarray], Job]  # (experts, slots of host memory)


class Driver:
    """Fetches and computes one model's experts as the scheduler decides, step by step.

    A step is one MoE layer of a forward pass. `foresight` predicts experts unless all have slots,
    with `predict_in_worker` in its own thread; `guard` stops prefetching while it does not pay;
    with two links, chunks pass through `host_memory`. All that the driver gets is closed with it.
    After an exception in the scheduler slots are unknown: the driver is broken (ClosedError)."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        slots: Tier,
        *,
        foresight: Foresight | None = None,
        guard: Guard | None = None,
        predict_in_worker: bool = False,
        links: tuple[str, ...] = ("disk -> host",),
        host_memory: HostMemory | None = None,
        slot_table: SlotTable | None = None,
    ) -> None:
        self.scheduler, self.slots, lanes = scheduler, slots, scheduler.view.lanes
        self.pieces = pieces = scheduler.view.pieces
        self.changes = SlotChanges(slots, pieces, slot_table)
        self.meter = Meter.for_lanes(lanes, pieces.layers)
        self.request_counts = np.zeros(pieces.experts, np.int64)  # requests of each expert
        self.miss_counts = np.zeros(pieces.layers, np.int64)  # misses of each layer
        self.resident = ResidentTables(scheduler, self.request_counts)
        self.capacity_range = scheduler.capacity, scheduler.capacity  # least and most so far
        self.timeline: Timeline | None = None
        self.links, self._store, self.host_memory = links, store, host_memory
        self._actions = ActionQueue()
        self.lock, self._changed = self._actions.lock, self._actions.changed
        self.step_lock = FairLock()
        self.error: Failure | None = None  # of the current step
        self._overlapped_work: Callable[[], object] | None = None
        self.passes = Passes(self.meter, pieces.layers)
        loads = None
        if slot_table is not None and host_memory is not None:
            assert isinstance(slots, DeviceSlots)
            loads = HostLoads(store.chunks, slots, host_memory, slot_table)
        self._ordered = OrderedCopies(store, slots, host_memory, slot_table, scheduler)
        self.device_steps = DeviceSteps(self, self._actions, loads, self._handle)
        self.deferred = DeferredSteps(self.device_steps.serve)
        self._host: HostWorker | None = None
        with contextlib.ExitStack() as opened:  # a refused thread ends those before it
            for each in (host_memory, slots, store, slot_table, self._ordered):
                if each is not None:
                    opened.callback(each.close)
            if any(option.uses_host for option in scheduler.options):
                self._host = opened.enter_context(contextlib.closing(HostWorker(self.meter)))
            self._deliveries = Deliveries(self, self._actions, self._handle_locked)
            self._copier = Copier(store, slots, lanes, self._deliveries.arrive, host_memory)
            opened.callback(self._copier.close)
            self.predictions = Predictions(
                foresight, guard, self._actions, self.meter, lambda: self.all_have_slots,
                self._handle, worker=predict_in_worker,
            )  # fmt: skip
            opened.callback(self.predictions.close)
            self._opened = opened.pop_all()

    def begin_pass(self, at: PassStart) -> None:
        """Begin a forward pass of the model: start its clock and predict its experts."""
        self.deferred.settle()
        with self.lock:
            self.passes.begin(at)
            self.scheduler.idle.end()
        self.predictions.begin(at, self.passes.number + 1)

    @property
    def all_have_slots(self) -> bool:
        """Check whether the cache has a slot for every expert of the model."""
        return self.scheduler.capacity >= self.pieces.experts

    def end_pass(self) -> None:
        """End the current forward pass, also an abandoned one; do nothing without a pass."""
        self.deferred.end_pass()
        self.device_steps.count_loads()
        if (ended := self.passes.end()) is None:
            return
        begin, end, waited, tokens = ended
        prefill = self.passes.prefill
        if (timeline := self.timeline) is not None:
            timeline.add_span("passes", "prompt" if prefill else "token", begin, end)
        self.predictions.end(prefill, end - begin, waited, tokens)

    def interrupt(self) -> None:
        """Make the current pass's MoE layers raise Interrupted, until `resume`; no reads begin."""
        self._actions.interrupt()

    def resume(self) -> None:
        """Let forward passes run again after `interrupt`."""
        self._actions.resume()

    def step(
        self,
        layer: int,
        experts: np.ndarray,
        compute: ComputeExperts,
        rows: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        *,
        tail_weights: np.ndarray | None = None,
        observe_routing: Observe | None = None,
        overlapped_work: Callable[[], object] | None = None,
        prepare_host_job: PrepareHostJob | None = None,
        computed: Collection[int] = (),
        by_table: bool = False,
    ) -> None:
        """Fetch and compute the experts that one MoE layer's tokens chose.

        compute: called with (experts, slots) of a group; if experts are split into two segments,
            with (experts, slots, part) for the top segments, then for the bottom segments
        experts, computed: ids within the layer, ascending, int64; those that were computed already
        rows, weights: number of tokens that chose each expert, and the sum of their gate weights
        tail_weights: each expert's tail weight (see `core.gates`), if misses may be approximated
        observe_routing: returns the routing for the predictor, with the router's inputs if true
        overlapped_work: called at most once, when the step would otherwise wait
        prepare_host_job: makes a job from (experts, slots) for the host processor's thread
        by_table: `compute` reads the device's table of slots

        Raises StoreError or DeviceError; the cache stays usable, also if `compute` raises."""
        self.deferred.settle()
        if experts.size == 0:
            return
        with self.step_lock:
            self.begin_exclusive(interruptible=True)
            self.changes.follow_stream()
            passes, first = self.passes, self.pieces.offsets[layer]
            passes.note_layers(layer, layer)
            self.resident.count(pieces := experts + first)
            event = Routed(
                passes.number, layer, pieces, passes.request, rows, weights, passes.prefill,
                tail_weights, prepare_host_job is None, frozenset(first + e for e in computed),
            )  # fmt: skip
            if (slots := self._resident_slots(event)) is not None:
                try:
                    self.predictions.observe(passes.number, layer, observe_routing)
                    self._compute_group(ComputeGroup(pieces, slots), compute, experts, slots)
                finally:
                    with self.lock:
                        self.scheduler.resident_steps.unpin()
                return
            self._overlapped_work, self.error = overlapped_work, None
            try:
                self._request(event, observe_routing, in_order=not by_table)
                action = self._compute(layer, compute, prepare_host_job)
                self._end_copies()
            except BaseException:
                self._abandon()
                raise
            if action.failed >= 0:
                raise self.error or read_error(action.failed)

    def _request(self, event: Routed, observe_routing: Observe | None, *, in_order: bool) -> None:
        """Request a step's experts from the scheduler, and tell the predictor of the choice."""
        if in_order and self.timeline is None:  # which has the times of chunks
            self._ordered.begin()
        layer, misses = event.layer, (view := self.scheduler.view).misses
        self.predictions.reached(event.step, layer)
        self._handle(event)
        self.miss_counts[layer] += view.misses - misses
        self.predictions.routed(layer, observe_routing)

    def _resident_slots(self, event: Routed) -> np.ndarray | None:
        """Serve a step without events and pin its experts; return their slots, or None."""
        with self.lock:
            residents, predicts = self.scheduler.resident_steps, self.predictions.predicts
            return None if predicts else residents.serve_pinned(event, time.perf_counter())

    def _compute(
        self, layer: int, compute: ComputeExperts, prepare_host_job: PrepareHostJob | None
    ) -> Finish:
        """Compute the step's expert groups as they arrive; return the action that ends it."""
        first, has_parts = self.pieces.offsets[layer], self.scheduler.groups_have_parts
        while isinstance(action := self._next_action(), ComputeGroup):
            if action.device == HOST:
                self._start_host_job(action, prepare_host_job)
                continue
            part = (action.part,) if has_parts else ()
            self._compute_group(action, compute, action.experts - first, action.slots, *part)
            self._handle(Computed(action.device))
        return action

    def _compute_group(self, group: ComputeGroup, compute: ComputeExperts, *arguments: Any) -> None:
        """Compute a group of the current layer, and record its time."""
        begin = time.perf_counter()
        self._ordered.join(group.slots.tolist())
        compute(*arguments)
        if not self.passes.prefill:
            self.meter.computed_s += time.perf_counter() - begin
        if (timeline := self.timeline) is not None:
            timeline.add_group(self.passes.layer, group, begin)

    def _start_host_job(self, action: ComputeGroup, prepare: PrepareHostJob | None) -> None:
        """Have the host processor compute an expert group, while this thread goes on."""
        assert self._host is not None
        assert prepare is not None
        layer, begin = self.passes.layer, time.perf_counter()

        def done(error: BaseException | None) -> None:
            if (timeline := self.timeline) is not None:
                timeline.add_group(layer, action, begin)
            with self.lock:
                if error is not None:
                    self._actions.host_error = self._actions.host_error or error
                    self._changed.notify_all()
                elif self._actions.broken is None:
                    with contextlib.suppress(BaseException):  # every waiting thread gets the error
                        self._handle_locked(Computed(HOST))

        self._host.start(prepare(action.experts - self.pieces.offsets[layer], action.slots), done)

    def resident_steps(
        self, layers: Sequence[int], find: Callable[[SlotTables], Sequence[int]]
    ) -> int | None:
        """Compute consecutive MoE layers in one call, while all chosen experts are resident.

        `find` (see `ResidentTables`) computes layers up to the first one with an expert that is not
        resident; the caller calls `step` for that one. Returns the number of layers computed; None,
        without a call of `find`, if the scheduler must decide or a timeline is recorded."""
        if self.timeline is not None:
            return None
        with self.step_lock:
            self.begin_exclusive(interruptible=True)
            if done := self.resident.steps(layers[0], find):
                self.passes.note_layers(layers[0], layers[done - 1])
            return done

    def send(self, event: Event) -> None:
        """Send an event to the expert scheduler, between the computations of two MoE layers."""
        with self.step_lock:
            self.begin_exclusive()
            self._handle(event)

    def resize(
        self, capacity: int | None, scope: Scope | None = None, devices: Sequence[int] | None = None
    ) -> None:
        """Change the number of cache slots, their scope or devices; wait until the cache has them.

        None keeps the number. BudgetError or DeviceError, before anything changes, without room."""
        with self.step_lock:
            self.begin_exclusive()
            capacity = self.scheduler.capacity if capacity is None else capacity
            if capacity == self.scheduler.capacity and scope is None and devices is None:
                return
            sizes = self.scheduler.view.sizes_after_resize(capacity, scope, devices)
            with hold_interrupts():  # memory and scheduler agree about the slots
                self.slots.grow(capacity, scope, sizes)
                self._handle(Resized(capacity, None, scope, devices))
            with self.lock:  # prefetches in flight land first
                while self.scheduler.view.resizing:
                    self._actions.wait()
        least, most = self.capacity_range
        self.capacity_range = min(least, capacity), max(most, capacity)
        self.predictions.resized()

    def begin_exclusive(self, interruptible: bool = False) -> None:
        """Begin a step or a resize, after abandoning a step that an exception left unfinished."""
        actions, scheduler = self._actions, self.scheduler
        if actions.stopped:
            actions.check_open()
        is_left = scheduler.step is not None or self._ordered.thread != 0
        if actions or is_left or scheduler.resident_steps.unfinished:
            self._abandon()
        if interruptible and actions.stopped:
            actions.check_interrupted()

    def _handle(self, event: Event) -> None:
        with self.lock:
            self._handle_locked(event)

    def _handle_locked(self, event: Event) -> None:
        """Send the scheduler an event and execute its actions; the lock is held."""
        now = time.perf_counter()
        try:
            for action in self.scheduler.on(event, now):
                self._execute(action, now)
        except BaseException as error:
            self._actions.mark_broken(error)
            raise

    def _execute(self, action: Action, now: float) -> None:
        match action:
            case ComputeGroup() | Finish():
                self._actions.put(action)
            case StartChunk():
                self.changes.begin(action)
                self._deliveries.begin(action, now)
                if not self._ordered.take(action):
                    self._copier.start(action)
            case Move():
                self._ordered.settle()
                self.changes.move(action)
            case Trim():
                self._ordered.settle()
                self.changes.trim(action)
                self._changed.notify_all()

    def _next_action(self) -> ComputeGroup | Finish:
        if self._overlapped_work is not None and not self._actions:
            work, self._overlapped_work = self._overlapped_work, None
            work()
        while self._ordered.launches:  # a batch; the next one when the thread has nothing else
            with self.lock:
                self._ordered.launch(self._deliveries.handle)
            if self._actions:
                break
        if self._actions:  # only this thread takes actions, so it needs no lock
            return self._actions.popleft()
        with self.lock:
            if not self._actions:
                begin, cause = time.perf_counter(), stall_cause(self.scheduler.step)
                self._actions.wait_for_action()
                end = time.perf_counter()
                self.meter.add_stall(self.passes.layer, cause, end - begin)
                if (timeline := self.timeline) is not None:
                    timeline.add_stall(self.passes.layer, cause, begin, end)
            return self._actions.popleft()

    def _abandon(self) -> None:
        """Abandon the current step; wait for its reads and host job, which cannot be cancelled."""
        if self._host is not None:
            self._host.wait()
        with self.lock:
            self._actions.host_error = None
            self._actions.clear()
            self.scheduler.resident_steps.abandon()
            if self.scheduler.step is not None and self._actions.broken is None:
                self._handle_locked(Cancelled())
            self._end_copies()
            while not (self.scheduler.step is None or self._actions or self._actions.broken):
                self._changed.wait()
            self._actions.clear()

    def _end_copies(self) -> None:
        """Launch the copies that the step has left, and have later work wait for all of them."""
        with self.lock:
            self._ordered.end(None if self._actions.broken else self._deliveries.handle)
            self.meter.add_stall(self.passes.layer, "miss", self._ordered.take_seconds())

    def close(self) -> None:
        """End the expert driver's threads and free its slots, after the current step."""
        with self.step_lock:
            self._actions.close()
            self._opened.close()
