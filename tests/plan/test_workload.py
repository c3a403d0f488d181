"""What a plan goes by, and whose trace it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.errors import TraceError, UsageError
from greenroom.plan.workload import (
    decoded_tokens,
    earlier_workload,
    recorded_workload,
    synthetic_workload,
)
from greenroom.trace.locality import adjacent_overlap
from tests.plan.models import MODEL, trace


def test_the_models_own_recording():
    recorded_one = recorded_workload(trace(), MODEL, "it")
    assert recorded_one.recorded
    assert "recorded, 240 tokens of 6 requests" in recorded_one.description


def test_a_trace_of_another_model():
    with pytest.raises(
        TraceError, match=r"another model .64 experts in 4 layers, top-2.: small has"
    ):
        recorded_workload(trace(), replace(MODEL, top_k=3), "it")
    with pytest.raises(TraceError, match="another model of this shape, small"):
        recorded_workload(trace(), replace(MODEL, fingerprint="other"), "it")


def test_prompts_alone_are_not_enough():
    prompts = replace(trace(), pass_prefill=np.ones(trace().passes, np.bool_))
    with pytest.raises(UsageError, match="has prompts only"):
        recorded_workload(prompts, MODEL, "it")


def test_stand_ins_have_the_models_shape_and_differ_in_locality():
    recorded_one = synthetic_workload(MODEL)
    assert not recorded_one.recorded
    assert "no routing of this model is recorded" in recorded_one.description
    overlaps = [adjacent_overlap(each).mean() for each in recorded_one.traces]
    assert overlaps[1] < overlaps[0] < overlaps[2]
    for each in recorded_one.traces:
        assert tuple(each.experts_per_layer) == MODEL.experts_per_layer
        assert each.top_k == MODEL.top_k
        assert each.pass_prefill.any()


def test_what_earlier_runs_left_where_it_is_enough():
    own = trace(400)
    recorded_one = earlier_workload(own)
    assert recorded_one is not None
    assert recorded_one.recorded
    assert "the last 400 tokens of 6 requests in earlier runs" in recorded_one.description
    assert decoded_tokens(own) == 340
    assert earlier_workload(None) is None
    assert earlier_workload(own.select([0])) is None  # one request says nothing of others
    assert earlier_workload(trace(240)) is None  # 180 that were decoded


def test_layers_may_differ():
    model = replace(MODEL, experts_per_layer=(16, 4, 16, 8))
    for each in synthetic_workload(model).traces:  # or TraceError: ids in range, none twice
        assert tuple(each.experts_per_layer) == (16, 4, 16, 8)
