"""Expert predictions that are made while a model's routing is recorded, and stored with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Predictor, Shape
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, PredictorChoice, predictor
from greenroom.predictors.next_gate import InputPredictor

NOTHING = -1  # no prediction; a trace stores the largest value of its dtype instead

Rows = NDArray[np.int64]


def parse_predictors(text: str) -> list[PredictorChoice]:
    """Parse the expert predictors of `--predict NAME[:distance][,option=value...],NAME...`.

    An item with `=` before any colon is an option of the predictor before it. Raises UsageError for
    a wrong or repeated predictor, and for one that works in replays of a trace only.
    """
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part.partition(":")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if len(set(names)) < len(names):
        raise UsageError(f"--predict {text} names a predictor twice: name each one once")
    choices = [predictor(name) for name in names]
    for choice in choices:
        if choice.kind is AUTO or "trace" in choice.kind.needs:
            raise UsageError(
                f"--predict {choice.name}: predictor {choice.name} works in replays of a trace"
                " only, not while a model runs"
            )
    return choices


def distance_of(predictor: Predictor) -> int:
    """Return how many layers ahead a predictor predicts; 0 if it predicts a whole pass at once."""
    return predictor.distance or 0


class ForecastRecorder:
    """Runs expert predictors while a model runs, and collects each pass's predictions.

    A replay of the recorded trace makes the same predictions. Of a predictor's predictions for a
    layer, the last one is stored that is made at least its distance (a number of layers) ahead;
    predictors that read router inputs have no such limit. A prediction made at the start of a pass
    is stored if the predictor has no distance, if the pass has several tokens, or if it is the
    first pass of the trace.
    """

    def __init__(self, predictors: Mapping[str, Predictor], shape: Shape) -> None:
        self._predictors, self._shape = predictors, shape
        self._next_token: dict[str, Rows] = {}  # [L, width] of the token after this pass
        self._predicted: dict[str, Rows] = {}  # [T, L, width] of this pass

    def begin(self, at: PassStart) -> None:
        """Begin a forward pass: collect the predictions that are made at its start."""
        announced = at.first == 0 or at.tokens > 1
        before, self._next_token = self._next_token, {}
        for name, each in self._predictors.items():
            shape = (at.tokens, self._shape.layers, each.width)
            self._predicted[name] = np.full(shape, NOTHING)
            if name in before:
                self._predicted[name][0] = before[name]
            self._next_token[name] = np.full(shape[1:], NOTHING)
            each.begin(at)
            predictions = each.predict(-1)
            if announced or not distance_of(each):
                self._store(name, predictions, -1, 0)

    def layer(self, routing: LayerRouting) -> None:
        """Tell the predictors which experts a router chose, and collect their predictions."""
        for name, each in self._predictors.items():
            each.observe(routing)
            least = 0 if isinstance(each, InputPredictor) else distance_of(each)
            self._store(name, each.predict(routing.layer), routing.layer, least)

    def _store(self, name: str, predictions: list[LayerPrediction], layer: int, least: int) -> None:
        """Store an expert predictor's predictions, made after `layer`, for later layers.

        They are at least `least` layers ahead.
        """
        for prediction in predictions:
            if prediction.layer - layer >= least:
                beyond, target = divmod(prediction.layer, self._shape.layers)
                rows = (
                    self._next_token[name][None, target]
                    if beyond
                    else self._predicted[name][:, target]
                )
                width = min(rows.shape[1], prediction.experts.shape[1])
                rows[:] = NOTHING
                rows[:, :width] = prediction.experts[:, :width]

    def end(self) -> dict[str, Rows]:
        """End the forward pass; return its expert predictions by predictor name.

        Each array is [tokens, layers, width], with -1 where an expert is not predicted.
        """
        predicted, self._predicted = self._predicted, {}
        return predicted
