"""popularity: the experts of a layer that were used most of late. The simplest baseline.

    count[l][e] = sum over tokens of 0.5 ** (age / half-life)   where expert e was used

No routing of the pass itself is looked at, so that the distance says only when the guess is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import Option
from greenroom.core.predictor import Guess, Ids, PassBegins, Seen, Shape
from greenroom.predictors.kind import Kind, Setting
from greenroom.predictors.ranks import Floats, as_ids, for_all, guess, taken


@jit
def count(counts: Floats, experts: Ids, decay: float) -> None:
    """Add tokens, `experts` [T, K], to a layer's counts [E]."""
    for token in range(experts.shape[0]):
        for expert in range(counts.size):
            counts[expert] *= decay
        for rank in range(experts.shape[1]):
            counts[experts[token, rank]] += 1


class Popularity:
    name = "popularity"

    def __init__(self, shape: Shape, distance: int, half_life: float) -> None:
        self.distance: int | None = distance
        self._layers, self._width, self._ahead = shape.layers, shape.width, distance
        self._decay = np.float32(0.5 ** (1 / half_life))
        self._counts = np.zeros((shape.layers, max(shape.experts_per_layer)), np.float32)
        self._tokens = 1

    def begin(self, at: PassBegins) -> None:
        self._tokens = at.tokens

    def observe(self, seen: Seen) -> None:
        count(self._counts[seen.layer], as_ids(seen.experts), self._decay)

    def predict(self, layer: int) -> list[Guess]:
        if layer < 0:
            return []
        target = layer + self._ahead
        scores = self._counts[target % self._layers]
        return [for_all(guess(target, scores[None], self._width), self._layers, self._tokens)]

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {"counts": self._counts.copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        taken("counts", state, self._counts)


def make(setting: Setting) -> Popularity:
    return Popularity(setting.shape, setting.ahead, float(setting.options["half-life"]))


popularity = Kind(
    "popularity",
    make,
    "the experts that were used most of late",
    distance=1,
    options=(Option("half-life", 16.0, "tokens after which a use counts half", 0.1, 1e9),),
)
