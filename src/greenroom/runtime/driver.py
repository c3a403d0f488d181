"""The driver: turns the scheduler's actions into reads and computation, under one lock."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from greenroom.core.events import (
    HOST,
    Action,
    Cancelled,
    Compute,
    Computed,
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
from greenroom.core.foresight import Foresight
from greenroom.core.guard import Guard
from greenroom.core.layout import Copy
from greenroom.core.predictor import PassBegins, Seen
from greenroom.core.scheduler import Scheduler
from greenroom.core.whole import Tables
from greenroom.errors import ClosedError, Interrupted, StoreError
from greenroom.runtime.beside import Beside, Job
from greenroom.runtime.copier import Between, Copier, Failure, Store
from greenroom.runtime.meter import Meter
from greenroom.runtime.timeline import COMPUTE, ON_HOST, Timeline, lane
from greenroom.runtime.turns import Turns

ComputeWave = Callable[..., None]  # (experts, slots), and the part where waves have one
Join = Callable[[int, int, int], None]  # (a copy's slot, an expert's, the layer)
OnHost = Callable[[np.ndarray, np.ndarray], Job]  # (experts, slots of host memory)


class Slots(Protocol):
    """What the driver needs of the tier that experts are computed from."""

    @property
    def capacity(self) -> int: ...

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None: ...

    def clear(self, slot: int) -> None: ...

    def move(self, source: int, target: int) -> None: ...

    def trim(self, capacity: int) -> None: ...

    def fitting(self, capacity: int) -> int: ...

    def close(self) -> None: ...


log = logging.getLogger(__name__)


class Driver:
    """One model's experts at run time. Steps are served one after another.

    `foresight` predicts, unless every expert has a slot; `guard` switches it off where it does not
    pay. A predictor that raises is warned of once and not asked again.

    An exception in the midst of a decision, in whichever thread, leaves it unknown what is where:
    the driver is broken, whoever waits is told so (ClosedError), and so is everybody after.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        slots: Slots,
        *,
        foresight: Foresight | None = None,
        guard: Guard | None = None,
        links: tuple[str, ...] = ("disk -> host",),
        between: Between | None = None,
        join: Join | None = None,
    ) -> None:
        """`between` is the memory between two links; staging seats where none is given. `join`
        brings a copy to the slot of the expert that it becomes a part of."""
        self.scheduler, self.slots = scheduler, slots
        self.foresight, self.guard = foresight, guard
        self.meter = Meter.of(scheduler.queue.lanes)
        self.asked = np.zeros(scheduler.pieces.experts, np.int64)  # requests of each expert
        self.missed = np.zeros(scheduler.pieces.layers, np.int64)  # misses of each layer
        self.timeline: Timeline | None = None
        self.links = links
        self._store, self._between, self._join = store, between, join
        self._changed = threading.Condition()
        self._one_step = Turns()
        self._orders: deque[Compute | Finish] = deque()
        self._error: Failure | None = None  # of the step under way
        self._meanwhile: Callable[[], None] | None = None
        self._pass, self._layer = -1, scheduler.pieces.layers
        self._request = 0
        self._prefill = False
        self._begun: tuple[float, float, int] | None = (
            None  # of the pass: when, stalls then, tokens
        )
        self._foretold = False  # is the predictor told of this pass, from its beginning?
        self._starts: dict[tuple[int, int], float] = {}  # of chunks on (link, lane), for a timeline
        self._closed = self._interrupted = False
        self._broken: BaseException | None = None
        self._host = Beside() if scheduler.rates is not None else None
        self._host_error: BaseException | None = None
        queue = scheduler.queue
        self._copier = Copier(store, slots, queue.lanes, queue.seats, self._delivered, between)

    # ---- passes

    def begin_pass(self, at: PassBegins) -> None:
        """A pass begins; `at.request` says of which prompt."""
        with self._changed:
            self._request, self._prefill = at.request, at.prefill
            self._begun = time.perf_counter(), self.meter.stall_s, at.tokens
        self._foretold = self._foresees
        if self._foretold and not self._closed:
            self._foretell(lambda foresight: foresight.begin(at))

    @property
    def _foresees(self) -> bool:
        return (
            self.foresight is not None and self.scheduler.capacity < self.scheduler.pieces.experts
        )

    def end_pass(self) -> None:
        """The pass is over, or was given up."""
        if self._begun is None:
            return
        begun, stalls, tokens = self._begun
        self._begun, now = None, time.perf_counter()
        foretold, self._foretold = self._foretold, False
        if not self._prefill:
            self.meter.decodes += 1
            self.meter.decode_s += now - begun
            self.meter.waited_s += self.meter.stall_s - stalls
        if self.timeline is not None:
            self.timeline.span("passes", "prompt" if self._prefill else "token", begun, now)
        if self.guard is not None and foretold and self._foresees and not self._prefill:
            assert self.foresight is not None
            self.guard.passed(now - begun, self.meter.stall_s - stalls, tokens)
            self.foresight.on = self.guard.on

    def decided(self, layer: int, experts: np.ndarray) -> None:
        """A layer's router has chosen these (ids within it, ascending); its step is yet to come.

        They begin to come, where slots may be on loan.
        """
        if not self._closed:
            first = self.scheduler.pieces.offsets[layer]
            self._tell(Predicted(layer, experts + first, certain=True))

    def interrupt(self) -> None:
        """Nobody waits for the pass under way: its step raises Interrupted, and so do those that
        follow, until `resume`. What it has asked for is not fetched any more."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Steps are served again."""
        self._interrupted = False

    # ---- steps

    def step(
        self,
        layer: int,
        experts: np.ndarray,
        compute: ComputeWave,
        rows: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        *,
        tails: np.ndarray | None = None,
        seen: Callable[[bool], Seen] | None = None,
        meanwhile: Callable[[], None] | None = None,
        on_host: OnHost | None = None,
    ) -> None:
        """Have `compute(experts, slots)` called on every expert of a step once, in waves; of split
        experts `compute(experts, slots, part)` on every part, the top before the bottom.

        `experts` are ids within the layer, ascending, int64; `rows` and `weights` the tokens that
        chose each and the sums of their gate weights, for policies that look at them; `tails` say
        how much each matters, where misses may be served with less; `seen` gives
        what predictors are told, with the router's inputs or without. `meanwhile` is called when
        there is nothing to compute but a wait, once at most; what `on_host(experts, slots)` gives
        is called in the thread of the host's processor. StoreError where an expert cannot be
        read, DeviceError where the device does not take it; the cache stays usable, and so it does
        after an exception in `compute`.
        """
        if experts.size == 0:
            return
        first = self.scheduler.pieces.offsets[layer]
        with self._one_step:
            self._enter()
            self._check_wanted()
            self._come_to(layer)
            pieces = experts + first
            self.asked[pieces] += 1
            if (slots := self.scheduler.straight(pieces)) is not None:
                begin = time.perf_counter()
                compute(experts, slots)
                if self.timeline is not None:
                    self._show_wave(layer, Compute(pieces, slots), begin)
                return
            self._meanwhile, self._error = meanwhile, None
            misses = self.scheduler.counts.misses
            try:
                self._tell(
                    Routed(
                        self._pass,
                        layer,
                        pieces,
                        self._request,
                        rows,
                        weights,
                        self._prefill,
                        tails,
                        moved=on_host is None,
                    )
                )
                self.missed[layer] += self.scheduler.counts.misses - misses
                if self._foretold and self._foresees and seen is not None:
                    self._foretell(lambda foresight: foresight.routed(seen(foresight.on)))
                while isinstance(order := self._next_order(), Compute):
                    if order.device == HOST:
                        self._to_host(order, on_host)
                        continue
                    begin = time.perf_counter()
                    compute(order.experts - first, order.slots, *self._part(order))
                    if not self._prefill:
                        self.meter.computed_s += time.perf_counter() - begin
                    if self.timeline is not None:
                        self._show_wave(layer, order, begin)
                    self._tell(Computed(order.device))
            except BaseException:
                self._abandon()
                raise
            if order.failed >= 0:
                raise self._error or StoreError(f"expert {order.failed} could not be read")

    def _to_host(self, order: Compute, on_host: OnHost | None) -> None:
        """Have the host's processor compute a wave, while this thread goes on."""
        assert self._host is not None
        assert on_host is not None
        first, layer = self.scheduler.pieces.offsets[self._layer], self._layer
        begin = time.perf_counter()

        def done(error: BaseException | None) -> None:
            if self.timeline is not None:
                self._show_wave(layer, order, begin)
            with self._changed:
                if error is not None:
                    self._host_error = self._host_error or error
                    self._changed.notify_all()
                elif self._broken is None:
                    with contextlib.suppress(BaseException):  # it says so to everybody who waits
                        self._carry_out(Computed(HOST))

        self._host.start(on_host(order.experts - first, order.slots), done)

    @property
    def host_s(self) -> float:
        """Seconds that the host's processor has computed misses for."""
        return 0.0 if self._host is None else self._host.busy_s

    def at_once(
        self, layer: int, find: Callable[[Tables], int], compute: Callable[[], None]
    ) -> bool:
        """A step of which nothing is to be awaited or decided: `find` (see Scheduler.at_once), then
        `compute()`. False, and nothing done, where it has to be a `step`."""
        if self.timeline is not None:
            return False
        with self._one_step:
            self._enter()
            self._check_wanted()
            first = self.scheduler.pieces.offsets[layer]
            if not self.scheduler.at_once(first, self.asked, find):
                return False
            self._come_to(layer)
            compute()
            return True

    def several(self, layers: Sequence[int], find: Callable[[Tables], Sequence[int]]) -> int | None:
        """As `at_once` for the steps of layers that follow one another, which `find` also computes
        (see Scheduler.several), until one that has to be a `step`. How many steps were done; None
        where nothing was."""
        if self.timeline is not None:
            return None
        with self._one_step:
            self._enter()
            self._check_wanted()
            done = self.scheduler.several(self.asked, find)
            for layer in layers[: done or 0]:
                self._come_to(layer)
            return done

    def order(self, event: Event) -> None:
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
                    self._wait()
        if self.guard is not None:
            self.guard.changed()

    def _part(self, order: Compute) -> tuple[int, ...]:
        """What a wave is told beside its experts and slots."""
        scheduler = self.scheduler
        parts = scheduler.pieces.split is not None or scheduler.thresholds.most > 0
        return (order.part,) if parts else ()

    def _come_to(self, layer: int) -> None:
        """A layer's step; one that does not come after the last one's begins another pass."""
        self._pass += layer <= self._layer
        self._layer = layer
        self.meter.passes = self._pass + 1

    def _enter(self) -> None:
        """A step or a resize begins; a step whose leaving was interrupted is left now."""
        self._check_open()
        if self.scheduler.step is not None or self._orders:
            self._abandon()

    def _check_open(self) -> None:
        """ClosedError where nothing can be had any more."""
        if self._closed:
            raise ClosedError("the model was detached: load it again")
        if self._broken is not None:
            raise ClosedError(
                f"the cache of experts broke ({self._broken!r}): load the model again"
            ) from self._broken

    def _check_wanted(self) -> None:
        if self._interrupted:
            raise Interrupted("the pass was given up: nobody waits for it")

    def _wait(self) -> None:
        """Until something has changed; with the lock held."""
        self._check_open()
        if (error := self._host_error) is not None:
            self._host_error = None
            raise error
        self._changed.wait()

    def _foretell(self, ask: Callable[[Foresight], list[Predicted]]) -> None:
        """Tell the scheduler what is foreseen."""
        assert self.foresight is not None
        try:
            events = ask(self.foresight)
        except Exception as error:
            name, self.foresight = self.foresight.predictor.name, None
            log.warning("predictor %s failed, nothing is prefetched from here on: %r", name, error)
            return
        for event in events:
            self._tell(event)

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
            self._break(error)
            raise

    def _do(self, action: Action, now: float) -> None:
        match action:
            case StartChunk():
                if action.begins and action.slot >= 0:
                    self.slots.clear(action.slot)
                if action.joins >= 0:
                    assert self._join is not None
                    layer = int(self.scheduler.pieces.layer[action.piece])
                    self._join(action.joins, action.slot, layer)
                self.meter.links[action.link].starts(now)
                self._starts[action.link, action.lane] = now
                self._copier.start(action)
            case Compute() | Finish():
                self._orders.append(action)
                self._changed.notify_all()
            case Move():
                self.slots.move(action.source, action.target)
            case Trim():
                self.slots.trim(action.capacity)
                self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._changed.notify_all()

    def _next_order(self) -> Compute | Finish:
        if self._meanwhile is not None and not self._orders:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        with self._changed:
            if not self._orders:
                begin, cause = time.perf_counter(), self._cause()
                while not self._orders:
                    self._check_wanted()
                    self._wait()
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
            if self._broken is None:
                try:
                    self._arrived(action, nbytes, error)
                except BaseException as broken:
                    self._break(broken)

    def _arrived(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        now = time.perf_counter()
        self.meter.links[action.link].ends(now, nbytes)
        if self.timeline is not None:
            self._show_chunk(action, now)
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
            self._host_error = None
            self._orders.clear()
            if self.scheduler.step is not None and self._broken is None:
                self._carry_out(Cancelled())
                while not self._orders and self._broken is None:
                    self._changed.wait()
            self._orders.clear()

    def close(self) -> None:
        """End the threads and free the slots; a step under way ends first."""
        with self._one_step:
            if not self._closed:
                self._closed = True
                self._copier.close()
                if self._host is not None:
                    self._host.close()
                self._store.close()
                self.slots.close()
                if self._between is not None:
                    self._between.close()

    # ---- what a timeline shows

    def _show_wave(self, layer: int, order: Compute, begin: float) -> None:
        assert self.timeline is not None
        name = f"layer {layer}: {order.experts.size} experts"
        place = ON_HOST if order.device == HOST else COMPUTE
        self.timeline.span(place, name, begin, time.perf_counter(), layer=layer)

    def _show_chunk(self, action: StartChunk, now: float) -> None:
        assert self.timeline is not None
        args: dict[str, Any] = {"expert": action.piece, "chunk": action.chunk, "slot": action.slot}
        self.timeline.span(
            lane(self.links[action.link], action.lane),
            "demand" if action.demand else "prefetch",
            self._starts[action.link, action.lane],
            now,
            **args,
        )
