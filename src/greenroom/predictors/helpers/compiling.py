"""Compilation of a predictor's Numba functions before the first token."""

from __future__ import annotations

import numpy as np

from greenroom.core.predictor import LayerRouting, PassStart, Shape
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorChoice, PredictorSetup

LEARNS_FROM_ROUTING = {"token_ids"}  # needs of the kinds whose own compiled functions are called


def compile_predictor(choice: PredictorChoice) -> None:
    """Compile an expert predictor's Numba functions, by running it on invented routing.

    Another predictor of the same kind is run. Machine code depends on types only, so a few experts
    are enough. For a predictor that needs router inputs, a file or a trace, only the ranking of
    experts is compiled.
    """
    scores = np.zeros((1, 1), np.float32)
    top(scores, 1)
    top(scores, 1, 0.0)
    if choice.kind.needs - LEARNS_FROM_ROUTING:
        return
    shape = Shape((4,) * max(2, choice.distance or 0), 2)
    predictor, first = choice.build(PredictorSetup(shape)), 0
    for request in range(2):
        for tokens in (3, 1, 1):  # a prompt and two tokens
            ids = np.arange(tokens, dtype=np.int64)
            predictor.begin(PassStart(request, first, tokens, tokens > 1, ids))
            predictor.predict(-1)
            for layer in range(shape.layers):
                experts = np.tile(np.arange(shape.top_k), (tokens, 1))
                predictor.observe(LayerRouting(layer, experts))
                predictor.predict(layer)
            first += tokens
