"""pregated: each router chooses the next layer's experts (Pre-gated MoE, Hwang et al., 2024).

A pre-gated model is trained so that layer l's router, given the input of layer l, chooses the
experts of layer l + 1. Its routers, called as `Gates`, predict these without an error. The first
layer of a token has no router before it, and is not predicted. In a replay the trace's routing
stands for the routers.
"""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.predictor import Ids, Inputs, LayerPrediction, Predictor
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.next_gate import NextGatePredictor
from greenroom.predictors.oracle import NO_ID
from greenroom.predictors.recorded import ReplayPredictor


class PregatedPredictor(NextGatePredictor):
    """Predictor `pregated`: the next layer's router, applied to the present layer's inputs."""

    name = "pregated"

    def predict(self, layer: int) -> list[LayerPrediction]:
        return super().predict(layer) if layer + 1 < self._shape.layers else []

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._shape.top_k)


def build(setup: PredictorSetup) -> Predictor:
    setup = replace(setup, distance=1)
    if setup.gates is not None:
        return PregatedPredictor(setup)
    if setup.routed_experts is None:
        raise UsageError("predictor pregated needs a model with routers, or a trace")
    return ReplayPredictor("pregated", setup.routed_experts, NO_ID, setup)


pregated = PredictorKind(
    "pregated",
    build,
    "the routers of a pre-gated model, which choose a layer ahead",
    frozenset({"inputs", "gates"}),
)
