"""Predictions in a model's passes: a predictor is asked, and switched off where it does not pay."""

from __future__ import annotations

import logging
from collections.abc import Callable

from greenroom.core.events import Predicted
from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard

log = logging.getLogger(__name__)


class Predictions:
    """A predictor that raises is warned of once and not asked again."""

    def __init__(
        self,
        foresight: Foresight | None,
        guard: Guard | None,
        resident: Callable[[], bool],
        tell: Callable[[Predicted], None],
    ) -> None:
        """`resident`: has every expert a slot? `tell` is the scheduler's."""
        self.foresight, self.guard = foresight, guard
        self.observers = [tell]  # of what is foreseen
        self._resident = resident
        self._told = False  # is the predictor told of this pass, from its beginning?

    @property
    def _wanted(self) -> bool:
        return self.foresight is not None and not self._resident()

    def begin(self, at: PassStart, closed: bool) -> None:
        """A pass begins."""
        self._told = self._wanted
        if self._told and not closed:
            self._ask(lambda foresight: foresight.begin(at))

    def routed(self, seen: Callable[[bool], LayerRouting] | None) -> None:
        """A layer's router has chosen; `seen(inputs)` is what predictors are told."""
        if self._told and self._wanted and seen is not None:
            self._ask(lambda foresight: foresight.routed(seen(foresight.on)))

    def end(self, prefill: bool, seconds: float, waited: float, tokens: int) -> None:
        """The pass is over."""
        told, self._told = self._told, False
        if self.guard is not None and told and self._wanted and not prefill:
            assert self.foresight is not None
            self.guard.passed(seconds, waited, tokens)
            self.foresight.on = self.guard.on

    def resized(self) -> None:
        """The cache has another size."""
        if self.guard is not None:
            self.guard.changed()

    def _ask(self, ask: Callable[[Foresight], list[Predicted]]) -> None:
        """Tell the scheduler and others what is foreseen."""
        assert self.foresight is not None
        try:
            events = ask(self.foresight)
        except Exception as error:
            name, self.foresight = self.foresight.predictor.name, None
            log.warning("predictor %s failed, nothing is prefetched from here on: %r", name, error)
            return
        for event in events:
            for observe in self.observers:
                observe(event)
