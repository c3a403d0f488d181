"""routing-path: predicts a token's experts in all layers early, and corrects them later.

The idea is that of ExpertFlow (2024): "a lightweight predictor to accurately forecast routing paths
before computation begins", with "real-time error correction". We know only the paper's abstract;
this predictor is our own reading of it: linear, and learned online from the routing only.

Each expert e of each layer l has two logits, at the prediction distance d:

    early[l][e]  = bias[l][e] + by_id[id][l][e] + sum of last[l][f][e]  over the experts f that the
                                                    token before used in l
    passed[l][e] = early[l][e] + sum of link[m][l][f][e]  over the experts f that were used in
                                                    layer l - d - m, m = 0, 1, 2

Layers before the first are those of the token before. When a pass begins, `early` ranks the experts
of all layers except the first d. `passed` ranks those, since no later layer of the pass corrects
them. After layer l - d, `passed` ranks the experts of layer l again: this is the correction. The
first layers of the next pass are predicted in the same way, before the id of its token is known.

When a layer's routing is observed, the weights of both logits take a step of stochastic gradient
descent on the logistic loss: `link` by the error of `passed`, all other weights by the error of
`early`. So the two models are fitted stagewise, as in boosting.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Ids, LayerPrediction, LayerRouting, PassStart, Shape
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.helpers.learner import Arrays, Floats, PathLearner, predictions_of_pass
from greenroom.predictors.helpers.token_table import TokenTable

LINKS = 3
LINK_RATE, ID_RATE, BIAS_RATE = np.float32(0.1), np.float32(2.0), np.float32(0.03)
LEARNED_TOKENS = 64  # the last ones of a pass: learning from a long prompt takes too long


class PathModel(NamedTuple):
    """Learned weights of the predictor `routing-path`, and the experts of its current pass.

    Shapes are for T tokens, L layers, E experts in the largest layer and top-k K."""

    bias: Floats  # [L, E], -inf where a layer has no such expert
    last: Floats  # [L, E, E]
    link: Floats  # [LINKS, L, E, E]
    by_id: Floats  # [places, L, E]
    path: Ids  # [T + 1, L, K]: row 0 is the token before the pass
    places: Ids  # [T] row of each token's id in `by_id`, or -1
    distance: int


@jit
def add(row: Ids, table: Floats, logits: Floats) -> None:
    """Add a weight table's rows for the experts in `row` to logits [experts].

    The table is [experts, experts]. `row` [top_k] contains expert ids; -1 means unknown.
    """
    for i in range(row.size):
        if row[i] >= 0:
            weights = table[row[i]]
            for expert in range(logits.size):
                logits[expert] += weights[expert]


@jit
def move(row: Ids, table: Floats, step: Floats, rate: float) -> None:
    """Add a gradient step [experts] to a weight table's rows for some experts.

    The step is multiplied by `rate`. `row` [top_k] contains the experts; -1 means unknown.
    """
    for i in range(row.size):
        if row[i] >= 0:
            weights = table[row[i]]
            for expert in range(step.size):
                weights[expert] += rate * step[expert]


@jit
def logits_of(model: PathModel, token: int, layer: int, early: Floats, passed: Floats) -> None:
    """Write a token's logits [experts] for a layer: before and after its correction.

    `early` are the logits at the start of a pass, `passed` those corrected by earlier layers (see
    the module's docstring). `token` is a row of `model.path`, or one row beyond its end for the
    token after the pass.
    """
    path, layers = model.path, model.path.shape[1]
    place = model.places[token - 1] if token <= model.places.size else -1
    early[:] = model.bias[layer]
    if place >= 0:
        by_id = model.by_id[place, layer]
        for expert in range(early.size):
            early[expert] += by_id[expert]
    add(path[token - 1, layer], model.last[layer], early)
    passed[:] = early
    for m in range(LINKS):
        at = layers + layer - model.distance - m  # from the token before on
        if at >= 0:
            add(path[token - 1 + at // layers, at % layers], model.link[m, layer], passed)


@jit
def score(model: PathModel, first: int, layer: int, corrected: bool, scores: Floats) -> None:
    """Write scores [rows, experts] of a layer's experts, for tokens from row `first` on.

    `corrected` tells whether the scores are the logits `passed`, which earlier layers have
    corrected, or `early` (see the module).
    """
    other = np.empty(scores.shape[1], np.float32)
    for i in range(scores.shape[0]):
        if corrected:
            logits_of(model, first + i, layer, other, scores[i])
        else:
            logits_of(model, first + i, layer, scores[i], other)


@jit
def score_all(model: PathModel, scores: Floats) -> None:
    """Write scores [layers * tokens, experts] of all layers' experts, at a pass's start."""
    tokens = model.places.size
    for layer in range(model.path.shape[1]):
        rows = scores[layer * tokens : (layer + 1) * tokens]
        score(model, 1, layer, layer < model.distance, rows)


@jit
def replace_by_error(logits: Floats, used: Ids) -> None:
    """Replace logits [experts] by their errors, the negative gradient of the logistic loss.

    `used` are the ids of the experts that the token used.
    """
    for expert in range(logits.size):
        logits[expert] = -1 / (1 + exp(-logits[expert]))
    for i in range(used.size):
        logits[used[i]] += 1


@jit
def learn(model: PathModel, first: int, layer: int) -> None:
    """Update the weights by the experts that a pass's tokens, from row `first` on, used.

    The step is one of gradient descent for the weights of `layer`.
    """
    size, layers, path = model.bias.shape[1], model.path.shape[1], model.path
    early, passed = np.empty(size, np.float32), np.empty(size, np.float32)
    for token in range(first, path.shape[0]):
        place, used = model.places[token - 1], path[token, layer]
        logits_of(model, token, layer, early, passed)
        replace_by_error(early, used)
        replace_by_error(passed, used)
        for expert in range(size):
            model.bias[layer, expert] += BIAS_RATE * early[expert]
        if place >= 0:
            by_id = model.by_id[place, layer]
            for expert in range(size):
                by_id[expert] += ID_RATE * early[expert]
        move(path[token - 1, layer], model.last[layer], early, LINK_RATE)
        for m in range(LINKS):
            at = layers + layer - model.distance - m
            if at >= 0:
                row = path[token - 1 + at // layers, at % layers]
                move(row, model.link[m, layer], passed, LINK_RATE)


def initial_bias(shape: Shape) -> Floats:
    """Return the initial bias of logits, [layers, experts], with which all experts are equal.

    It is -inf for experts that a layer does not have.
    """
    bias = np.full((shape.layers, max(shape.experts_per_layer)), -np.inf, np.float32)
    for layer, experts in enumerate(shape.experts_per_layer):
        bias[layer, :experts] = -log(max(experts / shape.top_k - 1, 0.01))
    return bias


class RoutingPathPredictor(PathLearner):
    """Predictor `routing-path`: linear logits of all layers' experts, learned online."""

    name = "routing-path"
    _token_table: TokenTable

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        bias = initial_bias(self._shape)
        layers, size = bias.shape
        self._token_table = TokenTable((layers, size), np.float32)
        self._model = PathModel(
            bias,
            np.zeros((layers, size, size), np.float32),
            np.zeros((LINKS, layers, size, size), np.float32),
            self._token_table.rows,
            self._path,
            np.full(1, -1, np.int64),
            self._ahead,
        )

    def begin(self, at: PassStart) -> None:
        super().begin(at)
        places = self._token_table.of(at.token_ids, at.tokens)
        self._model = self._model._replace(path=self._path, places=places)

    def observe(self, routing: LayerRouting) -> None:
        self._path[1:, routing.layer] = routing.experts
        learn(self._model, max(1, len(self._path) - LEARNED_TOKENS), routing.layer)

    def predict(self, layer: int) -> list[LayerPrediction]:
        tokens, (layers, size), width = (
            len(self._path) - 1,
            self._model.bias.shape,
            self._shape.width,
        )
        if layer < 0:
            scores = np.empty((layers * tokens, size), np.float32)
            score_all(self._model, scores)
            return predictions_of_pass(scores, layers, width, -np.inf)
        beyond, target = divmod(layer + self._ahead, layers)
        first, rows = (tokens + 1, 1) if beyond else (1, tokens)
        scores = np.empty((rows, size), np.float32)
        score(self._model, first, target, True, scores)
        return [LayerPrediction(layer + self._ahead, top(scores, width))]

    def _arrays(self) -> Arrays:
        return {name: getattr(self._model, name) for name in ("bias", "last", "link")}


routing_path = PredictorKind(
    "routing-path",
    RoutingPathPredictor,
    "the token's whole path, learned online and corrected as layers pass (ExpertFlow)",
    frozenset({"token_ids"}),
    distance=2,
)
