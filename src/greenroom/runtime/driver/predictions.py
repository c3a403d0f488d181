"""Calls of an expert predictor during a model's forward passes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from greenroom.core.events import Predicted
from greenroom.core.pieces import Ints
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.driver.meter import Meter
from greenroom.runtime.driver.prediction_worker import PredictionWorker
from greenroom.runtime.driver.timeline import PREDICT, Timeline

BACKLOG = 4  # passes whose observations may wait for the worker
NEVER = 1 << 62  # a position behind every layer

log = logging.getLogger(__name__)
Observe = Callable[[Foresight], None]


class Predictions:
    """Calls an expert predictor in every forward pass, and sends its predictions to the scheduler.

    Nothing is predicted while the cache has a slot for every expert. A predictor that raises an
    exception is not called again; a warning is logged.

    With a worker, the predictor runs in a thread of its own (ProMoE, section 4.4). The thread that
    computes puts copies of what the predictor observes into a queue, and never waits. A prediction
    is dropped if the router of its layer has chosen before (it is overtaken). If `BACKLOG` passes
    wait in the queue, the rest of the pass is not observed. `timeline` records the calls.

    A position is the number of a layer counted over all passes: pass * layers + layer.
    """

    def __init__(
        self,
        foresight: Foresight | None,
        guard: Guard | None,
        actions: ActionQueue,
        meter: Meter,
        all_have_slots: Callable[[], bool],
        send: Callable[[Predicted], None],
        worker: bool = False,
    ) -> None:
        """Connect an expert predictor, and the guard that judges it, to the scheduler.

        `all_have_slots` returns whether the cache has a slot for every expert; `send` passes a
        prediction to the scheduler. With `worker` the predictor runs in a thread of its own.
        """
        self.foresight, self.guard = foresight, guard
        self.timeline: Timeline | None = None
        self._actions, self._meter = actions, meter
        self._all_have_slots, self._send = all_have_slots, send
        self._layers = foresight.layers if foresight is not None else 0
        self._pass_observed = self._prefill = False  # since the beginning of the pass
        self._on = True  # the guard's decision
        self._routed = -1  # position of the latest layer whose router has chosen
        self._worker = PredictionWorker(self._fail) if worker and foresight is not None else None
        self._in_queue = False  # the worker observes this pass

    @property
    def in_worker(self) -> bool:
        """Check whether the predictor runs in a thread of its own."""
        return self._worker is not None

    @property
    def enabled(self) -> bool:
        """Check whether the predictor is called: not while every expert has a slot."""
        return self.foresight is not None and not self._all_have_slots()

    @property
    def predicts(self) -> bool:
        """Check whether the predictor predicts in this pass; else it observes at most."""
        return self._on and self.enabled

    def start_off(self) -> None:
        """Predict nothing until the guard's first trial; without a guard nothing changes."""
        if self.guard is not None and self.foresight is not None:
            self.guard.start_off()
            self.foresight.on = self._on = False

    def begin(self, at: PassStart, number: int) -> None:
        """Begin a forward pass in the predictor; send its first predictions to the scheduler.

        `number` counts the model's passes from 0.
        """
        self._routed, self._prefill = number * self._layers - 1, at.prefill
        self._pass_observed = self.enabled
        if not self._pass_observed or self._actions.closed:
            return
        if self._worker is None:
            self._call(-1, lambda foresight: foresight.observe_start(at))
            return
        self._in_queue = True
        if at.token_ids is not None:
            at = at._replace(token_ids=at.token_ids.copy())
        self._queue(-1, lambda foresight: foresight.observe_start(at))

    def reached(self, number: int, layer: int) -> None:
        """Record that a layer's router has chosen, in the pass `number`."""
        self._routed = number * self._layers + layer

    def observe(
        self, number: int, layer: int, observe_routing: Callable[[bool], LayerRouting] | None
    ) -> None:
        """Tell the predictor of a layer's choice in pass `number`, which needed no event."""
        if self.enabled:
            self.reached(number, layer)
            self.routed(layer, observe_routing)

    def announce_routing(self, layer: int, pieces: Ints) -> None:
        """Start to fetch experts that a router has chosen, before their layer runs.

        `pieces` are their ids in the model, ascending. Prefetches must be able to borrow slots.
        """
        if self._actions.closed:
            return
        if self._layers:
            self._routed += (layer - self._routed - 1) % self._layers + 1
        self._send(Predicted(layer, pieces, certain=True))

    def routed(self, layer: int, observe_routing: Callable[[bool], LayerRouting] | None) -> None:
        """Tell the expert predictor which experts a layer's router chose.

        `observe_routing(inputs)` returns the routing, and the router's input hidden states if
        `inputs` is true. Layers after those that the predictor knows are not observed.
        """
        foresight = self.foresight  # the worker removes a predictor that fails
        if (
            layer >= self._layers
            or observe_routing is None
            or not self._pass_observed
            or foresight is None
            or self._all_have_slots()
        ):
            return
        inputs = self._on and not (self._prefill and foresight.stays_in_pass(layer))
        if self._worker is None:
            self._call(
                layer, lambda foresight: foresight.predictor.observe(observe_routing(inputs))
            )
        elif self._in_queue:
            try:
                routing = _copy(observe_routing(inputs))
            except Exception as error:
                self._fail(error)
            else:
                self._queue(layer, lambda foresight: foresight.predictor.observe(routing))

    def end(self, prefill: bool, seconds: float, waited: float, tokens: int) -> None:
        """Let the prefetch guard decide, after a decode pass, whether prefetching goes on.

        The guard stops prefetching while it does not pay. `seconds` is the duration of the pass,
        `waited` the seconds that it waited for experts.
        """
        observed, self._pass_observed = self._pass_observed, False
        foresight = self.foresight
        if self.guard is None or foresight is None or not observed or prefill or not self.enabled:
            return
        self.guard.passed(seconds, waited, tokens)
        on = self._on = self.guard.on
        if self._worker is None:
            foresight.on = on
        else:
            self._worker.put(lambda: setattr(foresight, "on", on))

    def resized(self) -> None:
        """Make the prefetch guard measure anew, after the number of cache slots changed.

        Predictions that a worker has not delivered yet are dropped.
        """
        self._routed = NEVER
        if self.guard is not None:
            self.guard.changed()

    def drain(self) -> None:
        """Wait until the predictor has observed all that is queued.

        The caller must not hold the driver's lock.
        """
        if self._worker is not None:
            self._worker.drain()

    def close(self) -> None:
        """End the predictor's thread; the predictor observes what is queued before."""
        if self._worker is not None:
            self._worker.close()

    def _queue(self, layer: int, observe: Observe) -> None:
        """Queue a call of the predictor for the worker, unless too many wait."""
        assert self._worker is not None
        if self._worker.waiting >= BACKLOG * (self._layers + 1):
            self._in_queue = False
        else:
            origin = self._routed
            self._worker.put(lambda: self._call(layer, observe, origin))

    def _call(self, layer: int, observe: Observe, origin: int = NEVER) -> None:
        """Let the expert predictor observe a layer, and send its predictions to the scheduler.

        `origin` is the layer's position, in the worker. In the thread that computes, no prediction
        is overtaken, so the position does not matter.
        """
        if (foresight := self.foresight) is None:
            return
        timeline = self.timeline
        begin = time.perf_counter() if timeline is not None else 0.0
        try:
            observe(foresight)
            overtaken = self._routed >= origin + foresight.reach
            events = [] if overtaken else foresight.predict(layer)
        except Exception as error:
            self._fail(error)
            return
        if timeline is not None:
            timeline.add_span(PREDICT, f"after layer {layer}", begin, time.perf_counter())
        if self._worker is not None:
            self._meter.overtaken += overtaken and foresight.predicts(layer)
            self._deliver(events, origin)
            return
        for event in events:
            self._send(event)

    def _deliver(self, events: Sequence[Predicted], origin: int) -> None:
        """Send predictions to the scheduler from the worker, except those that are overtaken."""
        with self._actions.lock:
            for event in events:
                if self._actions.closed or self._actions.broken is not None:
                    return
                if self._routed >= origin + event.distance:
                    self._meter.overtaken += 1
                    continue
                with contextlib.suppress(BaseException):  # every waiting thread gets the error
                    self._send(event)

    def _fail(self, error: BaseException) -> None:
        """End prefetching after an exception of the predictor."""
        foresight, self.foresight = self.foresight, None
        if foresight is not None:
            name = foresight.predictor.name
            log.warning("predictor %s failed, so no expert is prefetched any more: %r", name, error)


def _copy(routing: LayerRouting) -> LayerRouting:
    """Copy a routing's arrays, whose memory the model reuses."""
    layer, experts, weights, inputs = routing
    return LayerRouting(
        layer,
        experts.copy(),
        None if weights is None else weights.copy(),
        None if inputs is None else inputs.copy(),
    )
