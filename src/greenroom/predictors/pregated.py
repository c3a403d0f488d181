"""pregated: predicts by routers trained to choose the next layer's experts (Hwang et al., 2024).

A pre-gated model is trained so that a router, given the input of layer l, chooses the experts of
layer l + 1. This predictor calls that router as the router of layer l + 1 (`Gates.rank`), so its
predictions have no errors. The first layer has no layer before it, and is not predicted. In a
replay, the experts of the trace are predicted, as if its model had been trained in this way.
"""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.predictor import Ids, Inputs, LayerPrediction, Predictor
from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.next_gate import NextGatePredictor
from greenroom.predictors.oracle import NO_ID
from greenroom.predictors.recorded import ReplayWithinToken


class PregatedPredictor(NextGatePredictor):
    """Predictor `pregated`: the next layer's router, applied to this layer's router inputs."""

    name = "pregated"

    def predict(self, layer: int) -> list[LayerPrediction]:
        return super().predict(layer) if layer + 1 < self._shape.layers else []

    def _rank(self, target: int, rows: Inputs) -> Ids:
        return self._gates.rank(target, rows, self._shape.top_k)


def build(setup: PredictorSetup) -> Predictor:
    """Build the predictor `pregated`; UsageError if the setup has neither routers nor a trace."""
    setup = replace(setup, distance=1)
    if setup.gates is not None:
        return PregatedPredictor(setup)
    if setup.routed_experts is None:
        raise UsageError(
            "predictor pregated needs a model's routers or a trace, and has neither:"
            " load a model, or replay a trace"
        )
    routed = setup.routed_experts
    return ReplayWithinToken("pregated", routed, NO_ID, setup)


pregated = PredictorKind(
    "pregated",
    build,
    "the routers of a pre-gated model, which choose a layer ahead",
    frozenset({"inputs", "gates"}),
    replays_routing=True,
)
