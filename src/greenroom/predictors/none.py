"""none: the predictor that predicts nothing, so that nothing is prefetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup


class NullPredictor:
    """Predictor that predicts and learns nothing; base class of all predictors."""

    name, costly = "none", False
    distance: int | None
    width: int

    def __init__(self, setup: PredictorSetup) -> None:
        """Set the prediction distance; raise UsageError if the model has fewer layers."""
        self._shape, self._ahead = setup.shape, setup.ahead
        self.distance, self.width = setup.distance, setup.shape.width

    def begin(self, at: PassStart) -> None:
        pass

    def observe(self, routing: LayerRouting) -> None:
        pass

    def predict(self, layer: int) -> list[LayerPrediction]:
        return []

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        if state:
            raise ValueError(
                f"predictor {self.name} learns nothing: it has no state to restore, but got"
                f" {', '.join(state)}"
            )


none = PredictorKind("none", NullPredictor, "nothing is prefetched")
