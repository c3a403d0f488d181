"""recorded: predictions stored in a trace, replayed at the layers where they were made.

The prediction for a layer is replayed `distance` layers before it. The first `distance` layers of a
pass have no such layer in their own pass: they are predicted in the last layers of the pass before,
and only for the first token. In a pass of several tokens, and in the first pass of the trace, they
are predicted when the pass begins. If `learned` made the predictions, layer 0 of the same pass
predicts its first layers. With distance 0 all layers are predicted when a pass begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Ids, LayerPrediction, PassStart
from greenroom.errors import UnknownName, UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.learned import learned, targets_of
from greenroom.predictors.none import NullPredictor


class ReplayPredictor(NullPredictor):
    """Predictor that replays stored predictions, [tokens, layers, width] expert ids.

    The id `nothing` means that there is no further prediction.
    """

    def __init__(self, name: str, rows: NDArray[Any], nothing: int, setup: PredictorSetup) -> None:
        super().__init__(setup)
        self.name, self._rows, self._nothing = name, rows, nothing
        self._at, self._predicts_first_layers = PassStart(-1, 0, 0, False), True

    def begin(self, at: PassStart) -> None:
        if at.first + at.tokens > len(self._rows):
            raise UsageError(
                f"predictor {self.name} has predictions for {len(self._rows)} tokens, but a pass"
                f" ends at token {at.first + at.tokens - 1}, counted from 0: replay the trace that"
                " they belong to"
            )
        self._predicts_first_layers = at.tokens > 1 or self._at.tokens == 0
        self._at = at

    def predict(self, layer: int) -> list[LayerPrediction]:
        if self.distance is None:
            return [self._inside(i) for i in range(self._shape.layers)] if layer < 0 else []
        if layer < 0:
            return (
                [self._inside(i) for i in range(self.distance)]
                if self._predicts_first_layers
                else []
            )
        target = layer + self.distance
        if target < self._shape.layers:
            return [self._inside(target)]
        after = self._at.first + self._at.tokens
        if after >= len(self._rows):
            return []
        return [LayerPrediction(target, self._ids(after, 1, target - self._shape.layers))]

    def _inside(self, layer: int) -> LayerPrediction:
        return LayerPrediction(layer, self._ids(self._at.first, self._at.tokens, layer))

    def _ids(self, first: int, tokens: int, layer: int) -> Ids:
        ids = self._rows[first : first + tokens, layer].astype(np.int64)
        ids[ids == self._nothing] = -1
        return ids


class ReplayWithinToken(ReplayPredictor):
    """Predictor that replays predictions made within a token, from its layer 0 on.

    At layer 0 the first layers after it are predicted; layer 0 itself is not predicted (ProMoE,
    Pre-gated MoE).
    """

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0 or self.distance is None:
            return []
        return [self._inside(i) for i in targets_of(layer, self.distance, self._shape.layers)]


def build(setup: PredictorSetup) -> ReplayPredictor:
    """Build a predictor that replays the predictions stored in a trace.

    The option `of` names the predictor that made them; it may be left out if the trace has
    predictions of only one. Raises UsageError if the trace has no predictions or several,
    UnknownName for a wrong name.
    """
    predictions, name = setup.predictions, str(setup.options["of"])
    if not predictions:
        raise UsageError(
            "predictor recorded needs a trace with predictions: record the trace with --predict"
        )
    if not name and len(predictions) > 1:
        names = "|".join(predictions)
        raise UsageError(
            "the trace has predictions of several predictors: give recorded:of=NAME, with"
            f" NAME one of {names}"
        )
    name = name or next(iter(predictions))
    if name not in predictions:
        raise UnknownName("prediction of the trace", name, predictions)
    rows, distance = predictions[name].experts, int(predictions[name].distance)
    if not 0 <= distance <= setup.shape.layers:
        raise UsageError(
            f"the trace is damaged: its predictions of {name} have distance {distance}, not 0 to"
            f" {setup.shape.layers}"
        )
    nothing = int(np.iinfo(rows.dtype).max)
    replay = ReplayWithinToken if name == learned.name else ReplayPredictor
    return replay("recorded", rows, nothing, replace(setup, distance=distance or None))


recorded = PredictorKind(
    "recorded",
    build,
    "another predictor's predictions, recorded with the trace",
    frozenset({"trace"}),
    options=(PolicyOption("of", "", "the predictor to replay, if the trace has several"),),
)
