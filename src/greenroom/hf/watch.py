"""What MoEpic's configurator is to know of a model, recorded while it answers.

`--split auto` begins with half of every expert and equal budgets, and counts what decoded tokens
activate and what had been predicted (`core/activity.py`). That is kept with what else is learned of
a model; once there are TAU tokens, Algorithm 1 sets budgets and ratios anew whenever the model is
loaded: while nothing runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from greenroom.core.activity import Activity
from greenroom.core.events import Predicted
from greenroom.core.foresight import Foresight
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Split
from greenroom.core.predictor import Ids, Predictor
from greenroom.core.scope import Scope
from greenroom.hf.learned import Learned, State
from greenroom.hf.split import split_experts
from greenroom.plan.configurator import TAU, Latency, configure, layers_of
from greenroom.runtime.driver import Driver

NAME = "split"  # of the state that is kept
START = 0.5  # share of every expert before anything is known (Algorithm 1, line 4)
log = logging.getLogger(__name__)


class Heard(Foresight):
    """A foresight whose guesses somebody else hears too."""

    def __init__(
        self, predictor: Predictor, offsets: Sequence[int], hear: Callable[[Predicted], None]
    ) -> None:
        super().__init__(predictor, offsets)
        self._hear = hear

    def _predict(self, layer: int) -> list[Predicted]:
        events = super()._predict(layer)
        for event in events:
            self._hear(event)
        return events


class Watch:
    """Counts the tokens of decode passes."""

    def __init__(self, offsets: Sequence[int], known: Learned | None) -> None:
        self._offsets = tuple(offsets)
        self.activity = Activity(np.diff(offsets).tolist())
        self._expected: dict[int, Ids] = {}
        if known is not None and NAME in known.states:
            try:
                self.activity.restore(known.states[NAME])
            except ValueError as error:
                log.warning("what was recorded for --split auto is not used: %s", error)

    def predicted(self, event: Predicted) -> None:
        """A layer is expected to need these, likeliest first."""
        self._expected[event.layer] = event.experts - self._offsets[event.layer]

    def chosen(self, layer: int, experts: Ids) -> None:
        """A decoded token's router has chosen, [T, K]."""
        expected = self._expected.pop(layer, None)
        n = self.activity.experts[layer]
        for row in experts:
            self.activity.token(layer, row[(row >= 0) & (row < n)], expected)

    def state(self, driver: Driver) -> State | None:
        """What is kept: the counts, and seconds as MoEpic names them; None before a token."""
        meter, pieces = driver.meter, driver.scheduler.pieces
        link = meter.links[-1]
        if not meter.decodes or not link.nbytes:
            return None
        per_layer = meter.decodes * pieces.layers
        moe = meter.computed_s / per_layer
        beside = max(0.0, meter.decode_s - meter.waited_s - meter.computed_s) / per_layer
        split = pieces.split
        expert = split.whole if split is not None else int(pieces.nbytes.max())
        load = link.busy_s / link.nbytes * expert
        return {**self.activity.state(), "latency": np.array([beside, moe, 0.0, load])}


def auto_split(
    catalog: Catalog, known: Learned | None, capacity: int, top_k: int
) -> tuple[Catalog, Split | None, Scope]:
    """(the cut catalog, its split, budgets) by what earlier runs recorded; Algorithm 1's own start
    where that is less than TAU tokens. UsageError as `split_experts`."""
    watch = Watch(catalog.offsets, known)
    enough = int(watch.activity.tokens.min()) >= TAU
    if known is None or NAME not in known.states or not enough:
        return (*split_experts(catalog, START, top_k), "per-layer")
    latency = Latency(*known.states[NAME]["latency"].tolist())
    chosen = configure(layers_of(watch.activity), float(capacity), latency)
    cut, split = split_experts(catalog, [each.ratio for each in chosen], top_k)
    return cut, split, tuple(each.budget for each in chosen)
