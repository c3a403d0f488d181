"""Base classes of the expert predictors that learn from routing while a model runs."""

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
    """Base of expert predictors whose saved state is learned arrays.

    The state may include a table by token id, and the distance for which it is valid.
    """

    _of_distance = False  # whether the state is valid for one distance only
    _token_table: TokenTable | None = None

    @abstractmethod
    def _arrays(self) -> Arrays:
        """Return a predictor's learned arrays by name; they are not copied."""

    def state(self) -> Arrays:
        state = {name: array.copy() for name, array in self._arrays().items()}
        if self._of_distance:
            state["distance"] = np.array([self._ahead])
        return state if self._token_table is None else {**state, **self._token_table.state()}

    def restore(self, state: Arrays) -> None:
        if self._of_distance:
            distance = state.get("distance")
            if distance is None or distance.tolist() != [self._ahead]:
                layers = "another number of" if distance is None else distance.tolist()
                raise ValueError(
                    f"the saved state is of a predictor that looks {layers} layers ahead, but this"
                    f" one looks {self._ahead} ahead"
                )
        for name, array in self._arrays().items():
            fill(name, state, array)
        if self._token_table is not None:
            self._token_table.restore(state)


class PathLearner(Learner):
    """Base of learning predictors that use a forward pass's experts in all layers.

    `_path` [tokens + 1, layers, top_k] contains the experts that the tokens used: row 0 those of
    the token before the pass, -1 if unknown.
    """

    _of_distance = True

    def __init__(self, setup: PredictorSetup) -> None:
        super().__init__(setup)
        self._path = np.full((2, self._shape.layers, self._shape.top_k), -1, np.int64)
        self._request = -1

    def begin(self, at: PassStart) -> None:
        before = self._path[-1]
        self._path = np.full((at.tokens + 1, *before.shape), -1, np.int64)
        if at.request == self._request:  # a token of another request does not predict this one
            self._path[0] = before
        self._request = at.request


def predictions_of_pass(
    scores: Floats, layers: int, width: int, above: float
) -> list[LayerPrediction]:
    """Return predictions for all layers of a pass, from scores [layers * tokens, experts].

    Each token gets the `width` experts with the highest scores, if the scores are above `above`.
    """
    experts = top(scores, width, above)
    return [LayerPrediction(i, rows) for i, rows in enumerate(experts.reshape(layers, -1, width))]


def repeat_for_tokens(prediction: LayerPrediction, layers: int, tokens: int) -> LayerPrediction:
    """Repeat a prediction of one row for all tokens of the pass.

    A prediction for the next pass keeps its single row.
    """
    if prediction.layer >= layers or tokens == 1:
        return prediction
    return prediction._replace(experts=np.repeat(prediction.experts, tokens, axis=0))


def as_contiguous(experts: Ids) -> Ids:
    """Return expert ids as a contiguous int64 array, which compiled functions need."""
    return np.ascontiguousarray(experts, np.int64)
