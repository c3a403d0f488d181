"""pregated: the router is known a layer ahead (Pre-gated MoE, Hwang et al., 2024).

Such a model is trained so that layer l's router, given the input of layer l, chooses the experts of
layer l + 1. Its routers, asked as `Gates`, tell them before they are needed, without an error; the
first layer of a token has no router before it, and is not known. Where a trace is replayed instead,
what it holds stands for the routers.
"""

from __future__ import annotations

from greenroom.core.predictor import Gates, Guess, Predictor, Seen, Shape
from greenroom.errors import UsageError
from greenroom.predictors.kind import Kind, Setting
from greenroom.predictors.none import Nothing
from greenroom.predictors.oracle import NO_ID
from greenroom.predictors.recorded import Recorded


class Pregated(Nothing):
    """`gates.rank(l + 1, inputs of l, top_k)` is what layer l + 1 will use."""

    name = "pregated"
    distance: int | None = 1

    def __init__(self, gates: Gates, shape: Shape) -> None:
        self._gates, self._shape = gates, shape
        self._seen: Seen | None = None

    def observe(self, seen: Seen) -> None:
        self._seen = seen

    def predict(self, layer: int) -> list[Guess]:
        seen = self._seen
        if layer < 0 or layer + 1 == self._shape.layers or seen is None or seen.inputs is None:
            return []
        ids = self._gates.rank(layer + 1, seen.inputs, self._shape.top_k)
        return [Guess(layer + 1, ids)]


def make(setting: Setting) -> Predictor:
    if setting.gates is not None:
        return Pregated(setting.gates, setting.shape)
    if setting.routed is None:
        raise UsageError("predictor pregated needs a model whose routers are known ahead")
    return Recorded("pregated", setting.routed, NO_ID, 1, setting.shape)


pregated = Kind(
    "pregated",
    make,
    "the routers of a pre-gated model, which choose a layer ahead",
    frozenset({"inputs", "gates"}),
)
