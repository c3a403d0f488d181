"""token: predicts the experts that tokens with the same id used most often.

This is the token-based prediction of ProMoE (section 4.2), after Xue et al. (2024) and Jiang et al.
(2024):

    score[l][e] = count[id][l][e] + share[l][e]

All layers are predicted before a pass begins, and none of the next pass. The paper counts in a
recording made beforehand; here the counts are learned while the model runs, and may be saved
between runs. `share` is the number of uses of expert e by all tokens, divided by the uses of the
layer's most used expert: it decides for unknown ids and between equal counts. The table of ids is
bounded (predictors/helpers/token_table.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import (
    Arrays,
    Floats,
    Learner,
    as_contiguous,
    predictions_of_pass,
)
from greenroom.predictors.helpers.token_table import TokenTable

FULL = 60_000  # an id's counts, which are uint16, are halved when one of them reaches this
Counts = NDArray[np.uint16]


@jit
def count(table: Counts, overall: Floats, layer: int, places: Ids, experts: Ids) -> None:
    """Count the experts that tokens used in a layer, by token id and overall.

    table: [rows, layers, experts] counts by token id; halved when one reaches 60,000
    overall: [layers, experts] counts of all tokens
    places: [tokens] row of each token's id in the table; -1 if the id is unknown
    experts: [tokens, top_k] ids within the layer
    """
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
    """Write scores [layers * tokens, experts] of all layers' experts, by the tokens' ids.

    See `count` for the other arguments.
    """
    layers, experts = overall.shape
    for layer in range(layers):
        most = max(np.float32(1), overall[layer].max())
        for token in range(places.size):
            place, row = places[token], layer * places.size + token
            for expert in range(experts):
                scores[row, expert] = overall[layer, expert] / most
                if place >= 0:
                    scores[row, expert] += table[place, layer, expert]


class TokenPredictor(Learner):
    """Predictor `token`: counts of each layer's experts by token id, learned online."""

    name = "token"
    _token_table: TokenTable

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        row = self._shape.layers, max(self._shape.experts_per_layer)
        self._token_table = TokenTable(row, np.uint16)
        self._overall = np.zeros(row, np.float32)
        self._places = np.full(1, -1, np.int64)  # of this pass's tokens

    def begin(self, at: PassStart) -> None:
        self._places = self._token_table.of(at.token_ids, at.tokens)

    def observe(self, routing: LayerRouting) -> None:
        count(
            self._token_table.rows,
            self._overall,
            routing.layer,
            self._places,
            as_contiguous(routing.experts),
        )

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer >= 0:
            return []
        layers, experts = self._overall.shape
        scores = np.empty((layers * self._places.size, experts), np.float32)
        score(self._token_table.rows, self._overall, self._places, scores)
        return predictions_of_pass(scores, layers, self._shape.width, 0.0)

    def _arrays(self) -> Arrays:
        return {"overall": self._overall}


token = PredictorKind(
    "token",
    TokenPredictor,
    "the experts that the token's id used most often",
    frozenset({"token_ids"}),
)
