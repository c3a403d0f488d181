"""routing-path: the path of a token through all layers, predicted before it starts and corrected as
layers pass (ExpertFlow, 2024: "a lightweight predictor to accurately forecast routing paths before
computation begins", with "real-time error correction"; only its abstract is known to us, and the
predictor is our own reading of it: linear, and learned online from the routing alone).

Each expert e of each layer l has two logits:

    early[l][e]  = bias[l][e] + known[id][l][e] + sum of last[l][f][e]  over the experts f that the
                                                    token before used in l
    passed[l][e] = early[l][e] + sum of link[m][l][f][e]  over the experts f that were used in
                                                    layer l - d - m, m = 0, 1, 2

where layers before the first are those of the token before. `early` ranks the experts of all layers
when a pass begins (`passed` those of layers below d, which have nothing more to wait for); `passed`
does once layer l - d is over: the correction. The first layers of the pass to come are predicted
so before its token's id is known.

When a layer's routing is known, both logits are moved towards it by a step of stochastic gradient
descent on the logistic loss, each on its own error: `link` along that of `passed`, all else along
that of `early`, so that either is as good as it can be alone (stagewise, as in boosting).
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.predictor import Guess, Ids, PassBegins, Seen, Shape
from greenroom.core.ranking import top
from greenroom.predictors.kind import Kind, Setting
from greenroom.predictors.learner import Arrays, Floats, PathLearner, guesses_of_pass
from greenroom.predictors.places import Places

LINKS = 3
LINK_RATE, ID_RATE, BIAS_RATE = np.float32(0.1), np.float32(2.0), np.float32(0.03)
LEARNT = 64  # tokens of a pass: the last ones, so that long prompts take no long time


class Model(NamedTuple):
    """L layers, E experts in the largest."""

    bias: Floats  # [L, E], -inf where a layer has no such expert
    last: Floats  # [L, E, E]
    link: Floats  # [LINKS, L, E, E]
    known: Floats  # [places, L, E]


@jit
def add(row: Ids, table: Floats, logits: Floats) -> None:
    """The rows of a table [E, E] that experts [K] stand for; -1 is not known."""
    for i in range(row.size):
        if row[i] >= 0:
            weights = table[row[i]]
            for expert in range(logits.size):
                logits[expert] += weights[expert]


@jit
def move(row: Ids, table: Floats, step: Floats, rate: float) -> None:
    """Move these rows along a step [E]."""
    for i in range(row.size):
        if row[i] >= 0:
            weights = table[row[i]]
            for expert in range(step.size):
                weights[expert] += rate * step[expert]


@jit
def logits_of(
    model: Model, path: Ids, token: int, place: int, layer: int, distance: int,
    early: Floats, passed: Floats,
) -> None:  # fmt: skip
    """Both logits [E] of a layer, for the token of that row of `path` [T + 1, L, K]: row 0 is the
    token before the pass, and row T + 1, which is not there, the one after it.
    """
    for expert in range(early.size):
        early[expert] = model.bias[layer, expert]
    if place >= 0:
        known = model.known[place, layer]
        for expert in range(early.size):
            early[expert] += known[expert]
    add(path[token - 1, layer], model.last[layer], early)
    passed[:] = early
    layers = path.shape[1]
    for m in range(LINKS):
        at = layers + layer - distance - m  # from the token before on; what is before is not kept
        if at >= 0:
            add(path[token - 1 + at // layers, at % layers], model.link[m, layer], passed)


@jit
def expect(
    model: Model, path: Ids, places: Ids, first: int, layer: int, corrected: bool, distance: int,
    scores: Floats,
) -> None:  # fmt: skip
    """`scores` [rows, E] of a layer, for the tokens from that row of `path` on."""
    other = np.empty(scores.shape[1], np.float32)
    for i in range(scores.shape[0]):
        token = first + i
        place = places[token - 1] if token <= places.size else -1
        if corrected:
            logits_of(model, path, token, place, layer, distance, other, scores[i])
        else:
            logits_of(model, path, token, place, layer, distance, scores[i], other)


@jit
def expect_all(model: Model, path: Ids, places: Ids, distance: int, scores: Floats) -> None:
    """`scores` [L * T, E], of all layers when a pass begins; those of a layer lie together."""
    tokens = places.size
    for layer in range(path.shape[1]):
        rows = scores[layer * tokens : (layer + 1) * tokens]
        expect(model, path, places, 1, layer, layer < distance, distance, rows)


@jit
def error(logits: Floats, used: Ids, step: Floats) -> None:
    """What was used less what was expected, [E]: the gradient of the logistic loss, downwards."""
    for expert in range(logits.size):
        step[expert] = -1 / (1 + exp(-logits[expert]))
    for i in range(used.size):
        step[used[i]] += 1


@jit
def learn(model: Model, path: Ids, places: Ids, first: int, layer: int, distance: int) -> None:
    """Move the weights towards what the tokens from row `first` on used in a layer."""
    size = model.bias.shape[1]
    early, passed = np.empty(size, np.float32), np.empty(size, np.float32)
    for token in range(first, path.shape[0]):
        place, used = places[token - 1], path[token, layer]
        logits_of(model, path, token, place, layer, distance, early, passed)
        error(early, used, early)
        error(passed, used, passed)
        for expert in range(size):
            model.bias[layer, expert] += BIAS_RATE * early[expert]
        if place >= 0:
            known = model.known[place, layer]
            for expert in range(size):
                known[expert] += ID_RATE * early[expert]
        move(path[token - 1, layer], model.last[layer], early, LINK_RATE)
        layers = path.shape[1]
        for m in range(LINKS):
            at = layers + layer - distance - m
            if at >= 0:
                move(
                    path[token - 1 + at // layers, at % layers],
                    model.link[m, layer],
                    passed,
                    LINK_RATE,
                )


def untaught(shape: Shape) -> Floats:
    """[L, E] the logits of experts that are all used equally often."""
    bias = np.full((shape.layers, max(shape.experts_per_layer)), -np.inf, np.float32)
    for layer, experts in enumerate(shape.experts_per_layer):
        bias[layer, :experts] = -log(max(experts / shape.top_k - 1, 0.01))
    return bias


class RoutingPath(PathLearner):
    name = "routing-path"
    _known: Places

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        bias = untaught(self._shape)
        layers, size = bias.shape
        self._known = Places((layers, size), np.float32)
        self._model = Model(
            bias,
            np.zeros((layers, size, size), np.float32),
            np.zeros((LINKS, layers, size, size), np.float32),
            self._known.rows,
        )
        self._places = np.full(1, -1, np.int64)

    def begin(self, at: PassBegins) -> None:
        super().begin(at)
        self._places = self._known.of(at.token_ids, at.tokens)

    def observe(self, seen: Seen) -> None:
        path = self._path
        path[1:, seen.layer] = seen.experts
        first = max(1, len(path) - LEARNT)
        learn(self._model, path, self._places, first, seen.layer, self._ahead)

    def predict(self, layer: int) -> list[Guess]:
        tokens, (layers, size), width = self._places.size, self._model.bias.shape, self._shape.width
        if layer < 0:
            scores = np.empty((layers * tokens, size), np.float32)
            expect_all(self._model, self._path, self._places, self._ahead, scores)
            return guesses_of_pass(scores, layers, width, -np.inf)
        beyond, target = divmod(layer + self._ahead, layers)
        first, rows = (tokens + 1, 1) if beyond else (1, tokens)
        scores = np.empty((rows, size), np.float32)
        expect(self._model, self._path, self._places, first, target, True, self._ahead, scores)
        return [Guess(layer + self._ahead, top(scores, width))]

    def _arrays(self) -> Arrays:
        return {name: getattr(self._model, name) for name in ("bias", "last", "link")}


routing_path = Kind(
    "routing-path",
    RoutingPath,
    "the token's whole path, learned online and corrected as layers pass (ExpertFlow)",
    frozenset({"token_ids"}),
    distance=2,
)
