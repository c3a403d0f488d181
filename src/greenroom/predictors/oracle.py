"""oracle: predicts the experts that the trace will use: the upper bound of all predictors.

No predictor with the same distance can do better.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.recorded import ReplayPredictor

NO_ID = -1


def true_routing(setup: PredictorSetup, name: str) -> NDArray[Any]:
    """Return the trace's experts, [tokens, layers, top_k]. UsageError without a trace."""
    if setup.routed_experts is None:
        raise UsageError(
            f"predictor {name} needs the complete trace beforehand:"
            " it runs only where a trace is replayed"
        )
    return setup.routed_experts


def build(setup: PredictorSetup) -> ReplayPredictor:
    return ReplayPredictor("oracle", true_routing(setup, "oracle"), NO_ID, setup)


oracle = PredictorKind(
    "oracle", build, "the experts that will be used", frozenset({"trace"}), distance=1
)
