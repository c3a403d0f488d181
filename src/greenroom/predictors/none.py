"""none: expects nothing, so that nothing is prefetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup


class NullPredictor:
    """What all predictors have in common; itself it predicts and learns nothing."""

    name = "none"
    distance: int | None

    def __init__(self, setting: PredictorSetup) -> None:
        """UsageError where the model has fewer layers than the distance."""
        self._shape, self._ahead = setting.shape, setting.ahead
        self.distance = setting.distance

    def begin(self, at: PassStart) -> None:
        pass

    def observe(self, seen: LayerRouting) -> None:
        pass

    def predict(self, layer: int) -> list[LayerPrediction]:
        return []

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        if state:
            raise ValueError(f"{self.name} keeps nothing, but was given {', '.join(state)}")


none = PredictorKind("none", NullPredictor, "nothing is prefetched")
