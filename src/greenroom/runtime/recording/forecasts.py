"""Predictions of experts, made alongside a running model for its routing trace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Predictor, Shape
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, PredictorChoice, predictor

NOTHING = -1  # no prediction; a trace stores the largest value of its type

Rows = NDArray[np.int64]


def parse_predictors(text: str) -> list[PredictorChoice]:
    """Parse `NAME[:distance],...` to expert predictors that can run alongside a model.

    Options keep their commas: `markov:2,option=1,next-gate`. UsageError names a wrong predictor.
    """
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part.partition(":")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if len(set(names)) < len(names):
        raise UsageError(f"--predict {text}: a predictor is named twice")
    choices = [predictor(name) for name in names]
    for choice in choices:
        if choice.kind is AUTO or "trace" in choice.kind.needs:
            raise UsageError(
                f"--predict {choice.name}: works in replays of a trace only, not with a running"
                " model"
            )
    return choices


def distance_of(predictor: Predictor) -> int:
    """Return how many layers ahead a predictor predicts; 0 for a whole pass."""
    return predictor.distance or 0


class ForecastRecorder:
    """Runs expert predictors alongside a model, and collects each pass's predictions.

    They equal those of a replay of the trace (tests/predictors/replay.py): a prediction counts if
    made `distance` layers ahead or earlier; the last one replaces those before. Predictions at the
    beginning of a pass count without a distance, and for passes of several tokens.
    """

    def __init__(self, predictors: Mapping[str, Predictor], shape: Shape) -> None:
        self._predictors, self._shape = predictors, shape
        self._next_token: dict[str, Rows] = {}  # [L, width] of the token after this pass
        self._predicted: dict[str, Rows] = {}  # [T, L, width] of this pass

    def begin(self, at: PassStart) -> None:
        """Begin to collect predictions of a forward pass."""
        shape = (at.tokens, self._shape.layers, self._shape.width)
        announced = at.first == 0 or at.tokens > 1
        before, self._next_token = self._next_token, {}
        for name, each in self._predictors.items():
            self._predicted[name] = np.full(shape, NOTHING)
            if name in before:
                self._predicted[name][0] = before[name]
            self._next_token[name] = np.full(shape[1:], NOTHING)
            each.begin(at)
            predictions = each.predict(-1)
            if announced or not distance_of(each):
                self._store(name, predictions, -1, 0)

    def layer(self, routing: LayerRouting) -> None:
        """Show the expert predictors which experts a layer's router chose."""
        for name, each in self._predictors.items():
            each.observe(routing)
            self._store(name, each.predict(routing.layer), routing.layer, distance_of(each))

    def _store(self, name: str, predictions: list[LayerPrediction], layer: int, least: int) -> None:
        """Store an expert predictor's predictions, made after `layer`, for later layers.

        They are at least `least` layers ahead.
        """
        for prediction in predictions:
            if prediction.layer - layer >= least:
                width = min(self._shape.width, prediction.experts.shape[1])
                beyond, target = divmod(prediction.layer, self._shape.layers)
                rows = (
                    self._next_token[name][None, target]
                    if beyond
                    else self._predicted[name][:, target]
                )
                rows[:] = NOTHING
                rows[:, :width] = prediction.experts[:, :width]

    def end(self) -> dict[str, Rows]:
        """End the forward pass; return each predictor's predictions of its experts.

        [T, L, width]
        """
        predicted, self._predicted = self._predicted, {}
        return predicted
