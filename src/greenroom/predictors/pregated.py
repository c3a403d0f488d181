"""pregated: the router is known a layer ahead (Pre-gated MoE, Hwang et al., 2024).

Such a model is trained so that layer l's router, given the input of layer l, chooses the experts of
layer l + 1. Its routers, asked as `Gates`, tell them before they are needed, without an error; the
first layer of a token has no router before it, and is not known. Where a trace is replayed instead,
what it holds stands for the routers.
"""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.predictor import Ids, Inputs, LayerPrediction, Predictor
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.next_gate import NextGate
from greenroom.predictors.oracle import NO_ID
from greenroom.predictors.recorded import Recorded


class Pregated(NextGate):
    """What layer l + 1 will use is what its router chooses, given the inputs of layer l."""

    name = "pregated"

    def predict(self, layer: int) -> list[LayerPrediction]:
        return super().predict(layer) if layer + 1 < self._shape.layers else []

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._shape.top_k)


def build(setting: PredictorSetup) -> Predictor:
    setting = replace(setting, distance=1)
    if setting.gates is not None:
        return Pregated(setting)
    if setting.routed_experts is None:
        raise UsageError("predictor pregated needs a model whose routers are known ahead")
    return Recorded("pregated", setting.routed_experts, NO_ID, setting)


pregated = PredictorKind(
    "pregated",
    build,
    "the routers of a pre-gated model, which choose a layer ahead",
    frozenset({"inputs", "gates"}),
)
