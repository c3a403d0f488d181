"""markov: predicts the experts of a layer from the same token's experts in an earlier layer.

The predictor counts how often expert f of layer l + d was used by a token that used expert e of
layer l, at the distance d (beyond the last layer: how often by the next token). It combines the
counts for the K experts that a token used in layer l as if these were independent (naive Bayes):

    score[f] = sum over the K experts e of log(count[e][f] + PRIOR)
               - (K - 1) * log(sum over all e of (count[e][f] + PRIOR))

The accuracy of this score was 13 points higher than that of the sum of shares
count[e][f] / count[e] (OLMoE, d = 1: 58 % against 45 %). Counts do not decay: with a decay of a
thousandth per token the accuracy was 48 %.
"""

from __future__ import annotations

from math import exp, log, log1p

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import Arrays, Floats, PathLearner, as_contiguous

PRIOR = 0.1  # the count of a pair that was never seen


@jit
def learn(pairs: Floats, totals: Floats, before: Ids, after: Ids) -> None:
    """Count pairs of experts that tokens used in an earlier and a later layer.

    pairs: [experts, experts] logarithms of the counts of (earlier expert, later expert)
    totals: [experts] logarithms of the sums of the counts over the earlier experts
    before, after: [tokens, top_k] experts that the tokens used
    """
    for token in range(before.shape[0]):
        for i in range(before.shape[1]):
            row = pairs[before[token, i]]
            for j in range(after.shape[1]):
                row[after[token, j]] += log1p(exp(-row[after[token, j]]))
        for j in range(after.shape[1]):
            expert = after[token, j]
            totals[expert] += log1p(before.shape[1] * exp(-totals[expert]))


@jit
def score(pairs: Floats, totals: Floats, used: Ids, experts: int, scores: Floats) -> None:
    """Write scores for a layer's experts, given the experts used in an earlier layer.

    pairs, totals: logarithms of counts (see `learn`)
    used: [tokens, top_k] experts used in the earlier layer
    experts: number of the layer's experts; the columns of `scores` beyond get -inf
    scores: [tokens, experts of the largest layer]
    """
    for token in range(used.shape[0]):
        for expert in range(totals.size):
            scores[token, expert] = (1 - used.shape[1]) * totals[expert]
        for i in range(used.shape[1]):
            row = pairs[used[token, i]]
            for expert in range(totals.size):
                scores[token, expert] += row[expert]
        scores[token, experts:] = -np.inf


class MarkovPredictor(PathLearner):
    """Predictor `markov`: counts of pairs of experts used in layers `distance` layers apart."""

    name = "markov"

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        layers, experts = self._shape.layers, max(self._shape.experts_per_layer)
        self._pairs = np.full((layers, experts, experts), log(PRIOR), np.float32)
        self._totals = np.full((layers, experts), log(PRIOR * experts), np.float32)

    def observe(self, routing: LayerRouting) -> None:
        path, layer, layers = self._path, routing.layer, self._shape.layers
        path[1:, layer] = routing.experts
        target, source = layer + self._ahead - layers, layer - self._ahead
        if target >= 0:  # of several tokens each follows the token before it
            self._learn(layer, path[1:-1, layer], path[2:, target])
        if source >= 0:
            self._learn(source, path[1:, source], path[1:, layer])
        elif path[0, source, 0] >= 0:
            self._learn(source, path[:1, source], path[1:2, layer])

    def _learn(self, source: int, before: Ids, after: Ids) -> None:
        if len(before):
            rows = as_contiguous(before), as_contiguous(after)
            learn(self._pairs[source], self._totals[source], *rows)

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0:
            return []
        beyond, target = divmod(layer + self._ahead, self._shape.layers)
        used = as_contiguous(self._path[-1:, layer] if beyond else self._path[1:, layer])
        scores = np.empty((len(used), self._totals.shape[1]), np.float32)
        experts = self._shape.experts_per_layer[target]
        score(self._pairs[layer], self._totals[layer], used, experts, scores)
        return [LayerPrediction(layer + self._ahead, top(scores, self._shape.width))]

    def _arrays(self) -> Arrays:
        return {"pairs": self._pairs, "totals": self._totals}


markov = PredictorKind(
    "markov",
    MarkovPredictor,
    "the experts used most after those just used, layer to layer",
    distance=1,
)
