"""oracle: predicts the experts that a trace will use, as the upper bound of all predictors.

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
    """Return the experts that a trace's routers chose: [tokens, layers, top_k].

    Raises UsageError, which names the predictor, if the setup has no trace.
    """
    if setup.routed_experts is None:
        raise UsageError(
            f"predictor {name} needs the complete trace beforehand, so it works only in replays of"
            " a trace: choose another predictor for a running model"
        )
    return setup.routed_experts


def build(setup: PredictorSetup) -> ReplayPredictor:
    """Build the predictor `oracle`; UsageError if the setup has no trace."""
    return ReplayPredictor("oracle", true_routing(setup, "oracle"), NO_ID, setup)


oracle = PredictorKind(
    "oracle", build, "the experts that will be used", frozenset({"trace"}), distance=1
)
