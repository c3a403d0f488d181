"""Steps of one token whose experts a device finds in its slots by itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from greenroom.core.events import Event, HostComputed, Routed
from greenroom.core.predictor import LayerRouting
from greenroom.core.scheduler.resident_steps import Misses
from greenroom.errors import DeviceError, Interrupted
from greenroom.runtime.cuda.host_loads import HostLoads, LoadedLayer
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.kernels.report import TokenReport

if TYPE_CHECKING:  # it has a `DeviceSteps`
    from greenroom.runtime.driver.driver import Driver


Result = TypeVar("Result")


class ComputedStep(Protocol):
    """A step of one token that a device has computed from slots.

    report:   which experts the token chose, and which of them were in no slot
    launches: those of its missing experts
    """

    layer: int
    report: TokenReport
    launches: LoadedLayer

    @property
    def device_only(self) -> bool:
        """Tell whether the host computes none of the step's experts."""

    def send_inputs(self) -> None:
        """Launch the copy of the token's inputs to the host, which computes some experts."""

    def compute_on_host(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute missing experts from slots of host memory, and launch the sum with them."""

    def observe(self, inputs: bool) -> LayerRouting:
        """Return the routing for the predictor (see `observe_routing` of `Driver.step`)."""

    def serve(self) -> None:
        """Let the scheduler serve the step, by events if it must."""

    def note(self) -> None:
        """Tell observers of the router's choice."""


class DeferredSteps(threading.local):
    """The calling thread's steps that were computed, and that the scheduler has yet to serve.

    They are of one pass. They are served before the thread asks anything else of the scheduler,
    which therefore decides as if it had served them at once. The device computes later layers
    meanwhile.

    without_host: the host's processor computes none of the thread's missing experts
    """

    without_host = False

    def __init__(self, serve_together: Callable[[Sequence[ComputedStep]], int]) -> None:
        """Begin without steps; `serve_together` serves the first ones, returns how many."""
        self._serve_together, self._steps = serve_together, list[ComputedStep]()

    def add(self, step: ComputedStep) -> None:
        """Add a step, to be served after those before."""
        if self._steps and step.layer <= self._steps[-1].layer:
            self.settle()
        self._steps.append(step)

    def settle(self) -> None:
        """Serve all steps."""
        if self._steps:
            steps, self._steps = self._steps, []
            served = self._serve_together(steps)
            for number, step in enumerate(steps):
                if number >= served:
                    step.serve()
                step.note()

    def end_pass(self) -> None:
        """Serve all steps of a pass that ends; if it was interrupted, its layers have said so."""
        with contextlib.suppress(Interrupted):
            self.settle()


class DeviceSteps:
    """Steps of one token whose experts a device finds in its slots by itself.

    The host hears of a choice when what is in slots has been computed. Where nothing but the
    eviction policy decides, the scheduler serves the step at once, and no thread waits.
    """

    def __init__(
        self,
        driver: Driver,
        actions: ActionQueue,
        loads: HostLoads | None,
        handle: Callable[[Event], None],
    ) -> None:
        """Serve a driver's steps.

        loads:  launches copies; None: the copier makes them all
        handle: sends the scheduler an event, and executes its actions
        """
        self._driver, self._actions, self._loads = driver, actions, loads
        miss_counts: Any = driver.miss_counts
        self._miss_counts = memoryview(miss_counts)  # NumPy takes a microsecond longer
        self._handle = handle

    def launch(self, start: Callable[..., Result], *arguments: Any) -> Result:
        """Call `start`, which launches work in order with the device's table of slots.

        No other step is under way, and slots are not resized. Returns the result of `start`.
        """
        driver = self._driver
        with driver.step_lock:
            driver.begin_exclusive(interruptible=True)
            return start(*arguments)

    def serve(self, steps: Sequence[ComputedStep]) -> int:
        """Serve steps of a pass that were computed; return how many until one needs events."""
        driver = self._driver
        if driver.timeline is not None or driver.predictions.predicts:
            return 0
        resident, residents = driver.resident, driver.scheduler.resident_steps
        with driver.step_lock:
            driver.begin_exclusive(interruptible=True)
            if resident.is_open:
                served = resident.serve([step.report.pieces for step in steps])
                if served:
                    driver.passes.note_layers(steps[0].layer, steps[-1].layer)
                return served or 0
            passes, now = list[int](), time.perf_counter()
            with driver.lock:
                for step in steps:
                    event = self._event(step)
                    if residents.serve(event, now) is None:
                        break
                    self._count(event)
                    passes.append(event.step)
                residents.report()  # while the device computes, not when it waits for a miss
            for number, step in zip(passes, steps, strict=False):
                driver.predictions.observe(number, step.layer, step.observe)
        return len(passes)

    def load(self, step: ComputedStep, then: Callable[[], None] | None = None) -> bool:
        """Serve a step whose missing experts are in host memory, and launch their copies.

        Those that the host is to compute it computes now, while the device is busy. If there are
        none, the launches of `then` follow at once. Returns False, and counts nothing, if the step
        needs events. An error of its launches leaves the missing experts without slots.
        """
        driver, loads, layer = self._driver, self._loads, step.layer
        if loads is None or driver.timeline is not None:
            return False
        with driver.step_lock:
            driver.begin_exclusive(interruptible=True)
            event, residents = self._event(step), driver.scheduler.resident_steps
            event.device_only = step.device_only
            driver.predictions.reached(event.step, layer)  # later predictions are overtaken
            with driver.lock:
                missing: Misses | None = None
                try:
                    missing = residents.load(event, time.perf_counter())
                    if missing is None:
                        return False
                    if missing.on_host:  # before copies of experts
                        step.send_inputs()
                    if missing.loads.size or self._has_device_part(step, missing):
                        after = None if missing.on_host else then
                        loads.launch(layer, missing.loads, step.launches, after)
                except BaseException as error:
                    self._undo(missing, event, error)
                    raise
                self._count(event)  # while experts are on their way
                misses = missing.loads.size + len(missing.on_host)
                self._miss_counts[layer] += misses
            predicts = driver.predictions.predicts  # which must not be late
            if predicts:
                driver.predictions.observe(event.step, layer, step.observe)
            if missing.on_host:
                self._compute_on_host(step, missing)
            if not predicts:
                driver.predictions.observe(event.step, layer, step.observe)
        return True

    def _has_device_part(self, step: ComputedStep, missing: Misses) -> bool:
        """Tell whether a device is to compute anything behind a step's look-up, but loads nothing.

        An expert that the look-up has not found may have come to its slot since then.
        """
        first = self._driver.pieces.offsets[step.layer]
        return not {first + expert for expert in step.report.missing}.issubset(missing.on_host)

    def _compute_on_host(self, step: ComputedStep, missing: Misses) -> None:
        """Compute a step's experts that the host has taken, which it releases in any case."""
        begin, seconds = time.perf_counter(), 0.0
        first = self._driver.pieces.offsets[step.layer]
        try:
            step.compute_on_host([piece - first for piece in missing.on_host], missing.host_slots)
            seconds = time.perf_counter() - begin
        finally:
            self._driver.meter.host_s += time.perf_counter() - begin
            self._handle(HostComputed(step.layer, missing.on_host, seconds))

    def _undo(self, missing: Misses | None, event: Routed, error: BaseException) -> None:
        """Remove from the cache the experts that a step could not load, because of an error.

        Without `missing` the error came while the scheduler served the step: slots are unknown.
        """
        try:
            if missing is None:
                raise error
            self._driver.scheduler.resident_steps.undo(missing, event)
        except BaseException as reason:
            self._actions.mark_broken(reason)
            raise

    def count_loads(self) -> None:
        """Count the bytes and seconds of the launched copies that have ended."""
        if self._loads is None:
            return
        meter, pieces = self._driver.meter, self._driver.pieces
        with self._driver.lock, contextlib.suppress(DeviceError):  # of a device that is lost
            for layer, experts, nbytes, seconds in self._loads.take_ended():
                meter.links[-1].nbytes += nbytes
                meter.links[-1].busy_s += seconds
                meter.add_stall(layer, "miss", seconds)
                in_slots = experts * int(pieces.nbytes[pieces.offsets[layer]])
                self._driver.scheduler.option_calls.copied(in_slots, seconds)

    def _event(self, step: ComputedStep) -> Routed:
        """Return the event of the next step, of a layer in this pass or the next one."""
        passes, layer = self._driver.passes, step.layer
        number, pieces = passes.number + (layer <= passes.layer), step.report.pieces
        return Routed(number, layer, pieces, passes.request, prefill=passes.prefill)

    def _count(self, event: Routed) -> None:
        self._driver.passes.note_layers(event.layer, event.layer)
        self._driver.resident.count(event.experts)
