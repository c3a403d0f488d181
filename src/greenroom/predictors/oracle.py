"""oracle: the experts that the trace says will be used, `distance` layers before. No predictor that
looks as far ahead can do better: the upper bound of them all.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from greenroom.errors import UsageError
from greenroom.predictors.helpers.kind import PredictorKind, PredictorSetup
from greenroom.predictors.recorded import Recorded

NO_ID = -1


def truth(setting: PredictorSetup, name: str) -> NDArray[Any]:
    """[tokens, layers, top_k] what will be used. UsageError where there is no trace."""
    if setting.routed_experts is None:
        raise UsageError(
            f"predictor {name} must know the whole trace beforehand:"
            " it runs where a trace is replayed only"
        )
    return setting.routed_experts


def build(setting: PredictorSetup) -> Recorded:
    return Recorded("oracle", truth(setting, "oracle"), NO_ID, setting)


oracle = PredictorKind(
    "oracle", build, "the experts that will be used", frozenset({"trace"}), distance=1
)
