"""recorded: the predictions that a trace holds, made again where they were made.

What was expected of layer l of token t comes `distance` layers before it; for the first layers of
a pass that is in the pass before, where the one token that follows is all that is known of the pass
to come. Of a pass of several tokens the others' first layers come when it begins, and so do those
of the first pass of all. Distance 0 stands for predictions of whole passes: all comes when they
begin.
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
from greenroom.predictors.none import NullPredictor


class Recorded(NullPredictor):
    """`rows` [tokens, layers, width] of experts; `nothing` is the id that stands for none."""

    def __init__(
        self, name: str, rows: NDArray[Any], nothing: int, setting: PredictorSetup
    ) -> None:
        super().__init__(setting)
        self.name, self._rows, self._nothing = name, rows, nothing
        self._at, self._known_late = PassStart(-1, 0, 0, False), True

    def begin(self, at: PassStart) -> None:
        if at.first + at.tokens > len(self._rows):
            raise UsageError(
                f"{self.name} has {len(self._rows)} tokens,"
                f" but token {at.first + at.tokens - 1} was asked for: not the trace's own run"
            )
        self._known_late = at.tokens > 1 or self._at.tokens == 0
        self._at = at

    def predict(self, layer: int) -> list[LayerPrediction]:
        if self.distance is None:
            return [self._inside(i) for i in range(self._shape.layers)] if layer < 0 else []
        if layer < 0:
            return [self._inside(i) for i in range(self.distance)] if self._known_late else []
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


def build(setting: PredictorSetup) -> Recorded:
    """The predictions of that name; without one, the only ones that there are."""
    there, name = setting.predictions, str(setting.options["of"])
    if not there:
        raise UsageError("predictor recorded needs a trace with predictions: this one has none")
    if not name and len(there) > 1:
        raise UsageError(f"the trace has several predictions: say of={'|'.join(there)}")
    name = name or next(iter(there))
    if name not in there:
        raise UnknownName("prediction of the trace", name, there)
    found, distance = there[name].experts, int(there[name].distance)
    if not 0 <= distance <= setting.shape.layers:
        raise UsageError(f"prediction {name} has distance {distance}: the trace is damaged")
    nothing = int(np.iinfo(found.dtype).max)
    return Recorded("recorded", found, nothing, replace(setting, distance=distance or None))


recorded = PredictorKind(
    "recorded",
    build,
    "what another predictor said when the trace was made",
    frozenset({"trace"}),
    options=(PolicyOption("of", "", "the predictor, where the trace has several"),),
)
