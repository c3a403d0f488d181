"""Calls of an expert predictor in a model's passes, stopped while prefetching does not pay."""

from __future__ import annotations

import logging
from collections.abc import Callable

from greenroom.core.events import Predicted
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard

log = logging.getLogger(__name__)


class Predictions:
    """Calls a predictor of experts in every pass, and sends its predictions to the scheduler.

    A predictor that raises is warned of once and dropped.
    """

    def __init__(
        self,
        foresight: Foresight | None,
        guard: Guard | None,
        all_have_slots: Callable[[], bool],
        send: Callable[[Predicted], None],
    ) -> None:
        """Connect an expert predictor and its guard to the scheduler.

        `all_have_slots` is True if every expert has a slot; `send` reaches the scheduler.
        """
        self.foresight, self.guard = foresight, guard
        self.observers = [send]  # of predictions
        self._all_have_slots = all_have_slots
        self._pass_observed = False  # since the beginning of the pass

    @property
    def _enabled(self) -> bool:
        return self.foresight is not None and not self._all_have_slots()

    def begin(self, at: PassStart, closed: bool) -> None:
        """Tell the predictor that a forward pass begins."""
        self._pass_observed = self._enabled
        if self._pass_observed and not closed:
            self._collect(lambda foresight: foresight.begin(at))

    def routed(self, observe_routing: Callable[[bool], LayerRouting] | None) -> None:
        """Show the predictor which experts a layer's router chose.

        `observe_routing(inputs)` makes the observation.
        """
        if self._pass_observed and self._enabled and observe_routing is not None:
            self._collect(lambda foresight: foresight.routed(observe_routing(foresight.on)))

    def end(self, prefill: bool, seconds: float, waited: float, tokens: int) -> None:
        """Judge by the ended pass whether prefetching pays, and switch it on or off."""
        observed, self._pass_observed = self._pass_observed, False
        if self.guard is not None and observed and self._enabled and not prefill:
            assert self.foresight is not None
            self.guard.passed(seconds, waited, tokens)
            self.foresight.on = self.guard.on

    def resized(self) -> None:
        """Restart the guard's judgement of prefetching after the number of slots changed."""
        if self.guard is not None:
            self.guard.changed()

    def _collect(self, call: Callable[[Foresight], list[Predicted]]) -> None:
        """Call the expert predictor, and pass its predictions to all observers."""
        assert self.foresight is not None
        try:
            events = call(self.foresight)
        except Exception as error:
            name, self.foresight = self.foresight.predictor.name, None
            log.warning("predictor %s failed, nothing is prefetched from here on: %r", name, error)
            return
        for event in events:
            for observe in self.observers:
                observe(event)
