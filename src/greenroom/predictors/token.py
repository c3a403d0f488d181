"""token: the experts that an input token's id used most often (ProMoE, section 4.2, token-based,
after Xue et al., 2024, and Jiang et al., 2024).

    score[l][e] = count[id][l][e] + share[l][e]

predicts all layers before a pass begins; nothing is known of a pass to come. The paper counts in a
recording made beforehand; here the counts are learned as the model runs, and may be kept between
runs. `share` is how often any token uses the expert: it decides for ids that are not known, and
between equals. What is known of ids is bounded (predictors/helpers/token_table.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import Arrays, Floats, Learner, as_ids, guesses_of_pass
from greenroom.predictors.helpers.token_table import TokenTable

FULL = 60_000  # counts are halved when one gets there: they are uint16
Counts = NDArray[np.uint16]


@jit
def count(table: Counts, overall: Floats, layer: int, places: Ids, experts: Ids) -> None:
    """Tokens at these places [T] (-1: id not known) used `experts` [T, K] of a layer."""
    for token in range(experts.shape[0]):
        place = places[token]
        for at in range(experts.shape[1]):
            expert = experts[token, at]
            overall[layer, expert] += 1
            if place >= 0:
                table[place, layer, expert] += 1
                if table[place, layer, expert] >= FULL:
                    for other in range(table.shape[2]):
                        table[place, layer, other] //= 2


@jit
def score(table: Counts, overall: Floats, places: Ids, scores: Floats) -> None:
    """`scores` [L * T, E]: those of a layer's T tokens lie together."""
    layers, experts = overall.shape
    for layer in range(layers):
        most = max(np.float32(1), overall[layer].max())
        for token in range(places.size):
            place, row = places[token], layer * places.size + token
            for expert in range(experts):
                scores[row, expert] = overall[layer, expert] / most
                if place >= 0:
                    scores[row, expert] += table[place, layer, expert]


class Token(Learner):
    name = "token"
    _known: TokenTable

    def __init__(self, setting: PredictorSetup) -> None:
        super().__init__(setting)
        row = self._shape.layers, max(self._shape.experts_per_layer)
        self._known = TokenTable(row, np.uint16)
        self._overall = np.zeros(row, np.float32)
        self._places = np.full(1, -1, np.int64)  # of this pass's tokens

    def begin(self, at: PassStart) -> None:
        self._places = self._known.of(at.token_ids, at.tokens)

    def observe(self, seen: LayerRouting) -> None:
        count(self._known.rows, self._overall, seen.layer, self._places, as_ids(seen.experts))

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer >= 0:
            return []
        layers, experts = self._overall.shape
        scores = np.empty((layers * self._places.size, experts), np.float32)
        score(self._known.rows, self._overall, self._places, scores)
        return guesses_of_pass(scores, layers, self._shape.width, 0.0)

    def _arrays(self) -> Arrays:
        return {"overall": self._overall}


token = PredictorKind(
    "token", Token, "the experts that the token's id used most often", frozenset({"token_ids"})
)
