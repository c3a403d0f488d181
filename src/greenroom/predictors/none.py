"""none: expects nothing, so that nothing is prefetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from greenroom.core.predictor import Guess, PassBegins, Seen
from greenroom.predictors.kind import Kind, Setting


class Nothing:
    """What is common to predictors that learn nothing; itself it predicts nothing."""

    name = "none"
    distance: int | None = None

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


def make(setting: Setting) -> Nothing:
    return Nothing()


none = Kind("none", make, "nothing is prefetched")
