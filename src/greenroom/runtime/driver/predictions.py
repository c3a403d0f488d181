"""Calls of an expert predictor during a model's forward passes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from greenroom.core.events import Predicted
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard

log = logging.getLogger(__name__)


class Predictions:
    """Calls an expert predictor in every forward pass, and sends its predictions to the scheduler.

    Nothing is predicted while the cache has a slot for every expert. A predictor that raises an
    exception is not called again; a warning is logged.
    """

    def __init__(
        self,
        foresight: Foresight | None,
        guard: Guard | None,
        all_have_slots: Callable[[], bool],
        send: Callable[[Predicted], None],
    ) -> None:
        """Connect an expert predictor, and the guard that judges it, to the scheduler.

        `all_have_slots` returns whether the cache has a slot for every expert; `send` passes a
        prediction to the scheduler.
        """
        self.foresight, self.guard = foresight, guard
        self.observers = [send]  # of predictions
        self._all_have_slots = all_have_slots
        self._pass_observed = False  # since the beginning of the pass

    @property
    def _enabled(self) -> bool:
        return self.foresight is not None and not self._all_have_slots()

    def begin(self, at: PassStart, closed: bool) -> None:
        """Begin a forward pass in the predictor; send its first predictions to the scheduler."""
        self._pass_observed = self._enabled
        if self._pass_observed and not closed:
            self._collect(lambda foresight: foresight.begin(at))

    def routed(self, observe_routing: Callable[[bool], LayerRouting] | None) -> None:
        """Tell the expert predictor which experts a layer's router chose.

        `observe_routing(inputs)` returns the routing, and the router's input hidden states if
        `inputs` is true.
        """
        if self._pass_observed and self._enabled and observe_routing is not None:
            self._collect(lambda foresight: foresight.routed(observe_routing(foresight.on)))

    def end(self, prefill: bool, seconds: float, waited: float, tokens: int) -> None:
        """Let the prefetch guard decide, after a decode pass, whether prefetching goes on.

        The guard stops prefetching while it does not pay. `seconds` is the duration of the pass,
        `waited` the seconds that it waited for experts.
        """
        observed, self._pass_observed = self._pass_observed, False
        if self.guard is not None and observed and self._enabled and not prefill:
            assert self.foresight is not None
            self.guard.passed(seconds, waited, tokens)
            self.foresight.on = self.guard.on

    def resized(self) -> None:
        """Make the prefetch guard measure anew, after the number of cache slots changed."""
        if self.guard is not None:
            self.guard.changed()

    def _collect(self, call: Callable[[Foresight], list[Predicted]]) -> None:
        """Call the expert predictor, and pass its predictions to all observers."""
        assert self.foresight is not None
        try:
            events = call(self.foresight)
        except Exception as error:
            name, self.foresight = self.foresight.predictor.name, None
            log.warning("predictor %s failed, so no expert is prefetched any more: %r", name, error)
            return
        for event in events:
            for observe in self.observers:
                observe(event)
