"""popularity: predicts the experts of a layer that recent tokens used most, a simple baseline.

    count[l][e] = sum over the tokens that used expert e in layer l of 0.5 ** (age / half-life)

The age of a token is the number of tokens after it. A layer's prediction does not depend on the
routing of other layers: the distance only decides when the prediction is made.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import (
    Arrays,
    Floats,
    Learner,
    as_contiguous,
    repeat_for_tokens,
)


@jit
def count(counts: Floats, experts: Ids, decay: float) -> None:
    """Add the experts [tokens, top_k] that tokens used to a layer's counts [experts].

    All counts are multiplied by `decay` before each token.
    """
    for token in range(experts.shape[0]):
        for expert in range(counts.size):
            counts[expert] *= decay
        for rank in range(experts.shape[1]):
            counts[experts[token, rank]] += 1


class PopularityPredictor(Learner):
    """Predictor `popularity`: counts of each layer's experts, which decay with every token."""

    name = "popularity"

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        self._decay = np.float32(0.5 ** (1 / float(setup.options["half-life"])))
        row = self._shape.layers, max(self._shape.experts_per_layer)
        self._counts = np.zeros(row, np.float32)
        self._tokens = 1

    def begin(self, at: PassStart) -> None:
        self._tokens = at.tokens

    def observe(self, routing: LayerRouting) -> None:
        count(self._counts[routing.layer], as_contiguous(routing.experts), self._decay)

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0:
            return []
        target, layers = layer + self._ahead, self._shape.layers
        experts = top(self._counts[None, target % layers], self._shape.width, 0.0)
        return [repeat_for_tokens(LayerPrediction(target, experts), layers, self._tokens)]

    def _arrays(self) -> Arrays:
        return {"counts": self._counts}


popularity = PredictorKind(
    "popularity",
    PopularityPredictor,
    "the experts that recent tokens used most",
    distance=1,
    options=(PolicyOption("half-life", 16.0, "tokens after which a use counts half", 0.1, 1e9),),
)
