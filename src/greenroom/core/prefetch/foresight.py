"""What a predictor says, as events for the scheduler: the same in a run and in a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.events import Predicted
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart, Predictor
from greenroom.errors import PredictorError


class Foresight:
    """A predictor and what becomes of its guesses. While it is not `on`, it only observes.

    Guesses for the tokens of a prompt are left out: nearly all experts are used there, and the
    scheduler knows which by itself. The last layers of a prompt predict the first token's first.
    """

    def __init__(self, predictor: Predictor, offsets: Sequence[int]) -> None:
        self.predictor, self.on = predictor, True
        self._offsets, self._layers = tuple(offsets), len(offsets) - 1
        self._prefill = False

    def begin(self, at: PassStart) -> list[Predicted]:
        """A pass begins."""
        self._prefill = at.prefill
        self.predictor.begin(at)
        return self._predict(-1)

    def routed(self, seen: LayerRouting) -> list[Predicted]:
        """A layer's router has chosen."""
        self.predictor.observe(seen)
        return self._predict(seen.layer)

    def _predict(self, layer: int) -> list[Predicted]:
        if not self.on:
            return []
        guesses = self.predictor.predict(layer)
        return [self._event(g) for g in guesses if not self._prefill or g.layer >= self._layers]

    def _event(self, guess: LayerPrediction) -> Predicted:
        layer = guess.layer % self._layers
        experts, first, end = ranked(guess.experts), self._offsets[layer], self._offsets[layer + 1]
        if len(experts) and experts.max() >= end - first:  # else it would name another layer's
            raise PredictorError(
                f"predictor {self.predictor.name}: layer {layer} has {end - first} experts, and it"
                f" predicts number {experts.max()}"
            )
        return Predicted(layer, experts + first)


def ranked(rows: Ids) -> Ids:
    """One ranking of several tokens' [T, width]: an expert's places are added up, first counts
    most; ties go to the smaller id. -1 is nobody."""
    if len(rows) == 1:
        row: Ids = rows[0]
        there: Ids = row if row[-1] >= 0 else row[row >= 0]
        return there
    width = rows.shape[1]
    points = np.zeros(int(rows.max()) + 1)
    for rank in range(width):
        chosen = rows[:, rank][rows[:, rank] >= 0]
        np.add.at(points, chosen, width - rank)
    order: Ids = np.argsort(-points, kind="stable")
    likeliest: Ids = order[points[order] > 0]
    return likeliest
