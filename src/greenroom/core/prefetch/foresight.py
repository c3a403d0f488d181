"""Conversion of expert predictions to scheduler events, in runs and simulations alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.events import Predicted
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart, Predictor
from greenroom.errors import PredictorError


class Foresight:
    """A predictor of experts, whose predictions become events for the scheduler.

    While `on` is False the predictor observes, and makes no predictions.

    Predictions for the tokens of a prompt are dropped: a prompt uses nearly all experts, and the
    scheduler has its own estimate for prompts. The last layers of a prompt predict the first layers
    of the first answer token.
    """

    def __init__(self, predictor: Predictor, offsets: Sequence[int]) -> None:
        self.predictor, self.on = predictor, True
        self._offsets, self.layers = tuple(offsets), len(offsets) - 1
        self._prefill = False

    @property
    def reach(self) -> int:
        """Return how many layers ahead of the present one a prediction may be."""
        distance = self.predictor.distance
        return 2 * self.layers if distance is None else distance

    def begin(self, at: PassStart) -> list[Predicted]:
        """Begin a forward pass; return predictions of its first layers' experts."""
        self.observe_start(at)
        return self.predict(-1)

    def routed(self, routing: LayerRouting) -> list[Predicted]:
        """Observe the experts that a router chose; return predictions for later layers."""
        self.predictor.observe(routing)
        return self.predict(routing.layer)

    def observe_start(self, at: PassStart) -> None:
        """Begin a forward pass in the predictor, without predictions."""
        self._prefill = at.prefill
        self.predictor.begin(at)

    def predict(self, layer: int) -> list[Predicted]:
        """Return predictions for the layers after a given one, the last that was observed.

        PredictorError if the predictor names an expert that the layer does not have.
        """
        if not self.predicts(layer):
            return []
        guesses = self.predictor.predict(layer)
        return [
            self._event(guess, guess.layer - layer)
            for guess in guesses
            if not self._prefill or guess.layer >= self.layers
        ]

    def predicts(self, layer: int) -> bool:
        """Tell whether predictions are made after a layer of this pass."""
        return self.on and not (self._prefill and self.stays_in_pass(layer))

    def stays_in_pass(self, layer: int) -> bool:
        """Tell whether all predictions made after a layer are for layers of the same pass."""
        return layer + self.reach < self.layers

    def _event(self, guess: LayerPrediction, distance: int) -> Predicted:
        layer = guess.layer % self.layers
        experts, first, end = ranked(guess.experts), self._offsets[layer], self._offsets[layer + 1]
        if len(experts) and experts.max() >= end - first:  # would be another layer's
            raise PredictorError(
                f"predictor {self.predictor.name} predicts expert {experts.max()} in layer {layer},"
                f" whose experts are 0 to {end - first - 1}"
            )
        priorities = None if guess.priorities is None else guess.priorities[experts]
        return Predicted(layer, experts + first, distance=distance, priorities=priorities)


def ranked(rows: Ids) -> Ids:
    """Combine the expert rankings of several tokens into one by Borda count.

    `rows` [T, width] has each token's experts, likeliest first; -1 stands for no expert. Returns
    the experts with at least one point, those with the most points first; ties go to the smaller
    id.
    """
    if len(rows) == 1:
        row: Ids = rows[0]
        valid: Ids = row if row[-1] >= 0 else row[row >= 0]
        return valid
    width = rows.shape[1]
    points = np.zeros(int(rows.max()) + 1)
    for rank in range(width):
        chosen = rows[:, rank][rows[:, rank] >= 0]
        np.add.at(points, chosen, width - rank)
    order: Ids = np.argsort(-points, kind="stable")
    likeliest: Ids = order[points[order] > 0]
    return likeliest
