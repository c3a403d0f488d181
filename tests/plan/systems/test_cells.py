"""What of a named system is simulated on a trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.plan.systems.cells import replayable_predictor
from greenroom.plan.systems.table import system
from greenroom.trace import Prediction
from tests.sim import small

TRACE = small.trace([[-3, 1, 1]], layers=2, experts=4, top_k=1)
ROWS = Prediction(np.zeros((TRACE.tokens, 2, 2), np.uint8), 1)


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [
        ((), "noisy-oracle:1,accuracy=0.85,width=all"),
        (("next-gate",), "next-gate:1"),
        (("next-gate", "next-gate:1,width=all"), "next-gate:1,width=all"),
        (("next-gate:width=all",), "next-gate:1,width=all"),
    ],
)
def test_moepic_ranks_as_many_experts_as_the_trace_allows(recorded, replayed):
    trace = dataclasses.replace(TRACE, predictions=dict.fromkeys(recorded, ROWS))
    assert system("moepic").prefetch == "next-gate:1,width=all"
    assert replayable_predictor(trace, system("moepic").prefetch) == replayed
    narrow = replayable_predictor(trace, "next-gate:1")
    assert narrow == ("next-gate:1" if "next-gate" in recorded else "noisy-oracle:1,accuracy=0.85")
