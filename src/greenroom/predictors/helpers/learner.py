"""What the predictors that learn from routing have in common: saved states, paths, guesses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Ids, LayerPrediction, PassStart
from greenroom.core.ranking import top
from greenroom.predictors.helpers.kind import PredictorSetup
from greenroom.predictors.helpers.token_table import TokenTable, filled
from greenroom.predictors.none import NullPredictor

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


class Learner(NullPredictor):
    """A predictor whose state is `_arrays`, and what it knows of token ids."""

    _of_distance = False  # whether what was learned holds for one distance only
    _known: TokenTable | None = None

    @abstractmethod
    def _arrays(self) -> Arrays:
        """What is learned, in place."""

    def state(self) -> Arrays:
        found = {name: array.copy() for name, array in self._arrays().items()}
        if self._of_distance:
            found["distance"] = np.array([self._ahead])
        return found if self._known is None else {**found, **self._known.state()}

    def restore(self, state: Arrays) -> None:
        if self._of_distance:
            distance = state.get("distance")
            if distance is None or distance.tolist() != [self._ahead]:
                raise ValueError(f"distance is {distance}, not [{self._ahead}]")
        for name, array in self._arrays().items():
            filled(name, state, array)
        if self._known is not None:
            self._known.restore(state)


class PathLearner(Learner):
    """A learner that knows the path of every token of the pass, and of the token before it.

    `_path` [T + 1, layers, top_k]: row 0 is the token before; -1 where nothing is known.
    """

    _of_distance = True

    def __init__(self, setting: PredictorSetup) -> None:
        super().__init__(setting)
        self._path = np.full((2, self._shape.layers, self._shape.top_k), -1, np.int64)
        self._request = -1

    def begin(self, at: PassStart) -> None:
        before = self._path[-1]
        self._path = np.full((at.tokens + 1, *before.shape), -1, np.int64)
        if at.request == self._request:  # nothing follows from another request's last token
            self._path[0] = before
        self._request = at.request


def guesses_of_pass(scores: Floats, layers: int, width: int, above: float) -> list[LayerPrediction]:
    """A guess for every layer; `scores` [layers * T, E]: those of a layer's T tokens lie
    together."""
    named = top(scores, width, above)
    return [LayerPrediction(i, rows) for i, rows in enumerate(named.reshape(layers, -1, width))]


def for_all(one: LayerPrediction, layers: int, tokens: int) -> LayerPrediction:
    """A guess of one row for all tokens of its pass, where that is the pass under way."""
    if one.layer >= layers or tokens == 1:
        return one
    return LayerPrediction(one.layer, np.repeat(one.experts, tokens, axis=0))


def as_ids(experts: Ids) -> Ids:
    """In the one layout that compiled functions are compiled for."""
    return np.ascontiguousarray(experts, np.int64)
