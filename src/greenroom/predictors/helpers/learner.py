"""Base classes of predictors that learn from routing: saved states and the pass's experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Ids, LayerPrediction, PassStart
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorSetup
from greenroom.predictors.helpers.token_table import TokenTable, fill
from greenroom.predictors.none import NullPredictor

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


class Learner(NullPredictor):
    """Learning predictor whose saved state is its arrays and a table of token ids."""

    _of_distance = False  # whether the state is valid for one distance only
    _token_table: TokenTable | None = None

    @abstractmethod
    def _arrays(self) -> Arrays:
        """Return a predictor's learned arrays themselves, not copies."""

    def state(self) -> Arrays:
        state = {name: array.copy() for name, array in self._arrays().items()}
        if self._of_distance:
            state["distance"] = np.array([self._ahead])
        return state if self._token_table is None else {**state, **self._token_table.state()}

    def restore(self, state: Arrays) -> None:
        if self._of_distance:
            distance = state.get("distance")
            if distance is None or distance.tolist() != [self._ahead]:
                raise ValueError(f"distance is {distance}, not [{self._ahead}]")
        for name, array in self._arrays().items():
            fill(name, state, array)
        if self._token_table is not None:
            self._token_table.restore(state)


class PathLearner(Learner):
    """Learning predictor that records the experts of the pass's tokens in all layers.

    `_path` [T + 1, layers, top_k]: row 0 is the token before the pass; -1 is unknown.
    """

    _of_distance = True

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        self._path = np.full((2, self._shape.layers, self._shape.top_k), -1, np.int64)
        self._request = -1

    def begin(self, at: PassStart) -> None:
        before = self._path[-1]
        self._path = np.full((at.tokens + 1, *before.shape), -1, np.int64)
        if at.request == self._request:  # another request's last token says nothing
            self._path[0] = before
        self._request = at.request


def predictions_of_pass(
    scores: Floats, layers: int, width: int, above: float
) -> list[LayerPrediction]:
    """Rank the experts of all layers by scores [layers * T, E]."""
    experts = top(scores, width, above)
    return [LayerPrediction(i, rows) for i, rows in enumerate(experts.reshape(layers, -1, width))]


def repeat_for_tokens(prediction: LayerPrediction, layers: int, tokens: int) -> LayerPrediction:
    """Repeat a one-row prediction for all tokens, unless the prediction is for the next pass."""
    if prediction.layer >= layers or tokens == 1:
        return prediction
    return LayerPrediction(prediction.layer, np.repeat(prediction.experts, tokens, axis=0))


def as_contiguous(experts: Ids) -> Ids:
    """Copy expert ids to the memory layout of compiled functions, unless they have it."""
    return np.ascontiguousarray(experts, np.int64)
