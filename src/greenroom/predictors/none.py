"""none: expects nothing, so that nothing is prefetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from greenroom.core.predictor import Guess, PassBegins, Seen
from greenroom.predictors.helpers.kind import Kind, Setting


class Nothing:
    """What all predictors have in common; itself it predicts and learns nothing."""

    name = "none"
    distance: int | None

    def __init__(self, setting: Setting) -> None:
        """UsageError where the model has fewer layers than the distance."""
        self._shape, self._ahead = setting.shape, setting.ahead
        self.distance = setting.distance

    def begin(self, at: PassBegins) -> None:
        pass

    def observe(self, seen: Seen) -> None:
        pass

    def predict(self, layer: int) -> list[Guess]:
        return []

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        if state:
            raise ValueError(f"{self.name} keeps nothing, but was given {', '.join(state)}")


none = Kind("none", Nothing, "nothing is prefetched")
