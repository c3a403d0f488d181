"""Small routing to run predictors over, and a plain driver that yields their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from greenroom.core.predictor import (
    Inputs,
    LayerPrediction,
    LayerRouting,
    PassStart,
    Predictor,
    Shape,
)
from tests.predictors.replay import Routing, passes

SHAPE = Shape((6, 4, 7), 2)
HIDDEN = 3


def routing(seed: int = 0, tokens: int = 60, shape: Shape = SHAPE, requests: int = 4) -> Routing:
    """Random requests: a pass of several tokens (the prompt), then passes of one."""
    random = np.random.default_rng(seed)
    experts = np.array(
        [[random.permutation(n)[: shape.top_k] for n in shape.experts_per_layer]
         for _ in range(tokens)], np.uint8,
    )  # fmt: skip
    starts = np.array([i * tokens // requests for i in range(requests)])
    prompts = {int(first): int(random.integers(1, 6)) for first in starts}
    pass_starts, prefill, at = [], [], 0
    while at < tokens:
        pass_starts.append(at)
        prefill.append(at in prompts)
        at += prompts.get(at, 1)
    return Routing(
        experts,
        np.array([*pass_starts, tokens]),
        np.array(prefill),
        np.array([*starts.tolist(), tokens]),
        random.integers(0, 9, tokens).astype(np.int32),
    )


def decode(experts: Any, ids: list[int] | None = None) -> Routing:
    """One request, a pass a token; `experts` [tokens, layers, top_k]."""
    array = np.array(experts, np.uint8)
    tokens = len(array)
    return Routing(
        array,
        np.arange(tokens + 1),
        np.zeros(tokens, np.bool_),
        np.array([0, tokens]),
        None if ids is None else np.array(ids, np.int32),
    )


class FakeGates:
    """Routers whose choice depends on layer and inputs, and on nothing else."""

    def rank(self, layer: int, inputs: Inputs, width: int) -> np.ndarray:
        experts = SHAPE.experts_per_layer[layer]
        first = (np.abs(inputs).sum(axis=1) * 100).astype(np.int64) + layer
        return (first[:, None] + np.arange(width)) % experts


def run_predictor(
    predictor: Predictor, routing: Routing, since: int = 0, until: int | None = None
) -> Iterator[tuple[PassStart, int, list[LayerPrediction]]]:
    """Yield (pass, layer, predictions) for the passes that begin at tokens `since` to `until`."""
    for at in passes(routing):
        if at.first < since or (until is not None and at.first >= until):
            continue
        predictor.begin(at)
        yield at, -1, predictor.predict(-1)
        for layer in range(routing.experts.shape[1]):
            experts = routing.experts[at.first : at.first + at.tokens, layer].astype(np.int64)
            random = np.random.default_rng([at.first, layer])
            inputs = random.normal(size=(at.tokens, HIDDEN)).astype(np.float32)
            predictor.observe(LayerRouting(layer, experts, None, inputs))
            yield at, layer, predictor.predict(layer)


def flatten(events: Iterator[tuple[PassStart, int, list[LayerPrediction]]]) -> list[Any]:
    """Flatten the predictions of `run_predictor` to a list that can be compared."""
    return [
        (at.first, layer, guess.layer, guess.experts.tolist())
        for at, layer, guesses in events
        for guess in guesses
    ]
