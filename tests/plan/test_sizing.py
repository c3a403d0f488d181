"""What a recording says of a system's sizes, beside counts that are made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.activity import Activity
from greenroom.errors import UnknownName, UsageError
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.sizing import (
    CacheConfiguration,
    predicted_activity,
    recorded_activity,
    slots_with_fewest_misses,
)
from greenroom.trace import stream
from greenroom.trace.trace import Prediction
from tests.sim import small

SECONDS = TokenLatency(attention=1.0, moe=1.0, head=0.0, load=4.0)


def test_the_programme_gives_slots_where_misses_are():
    """Layer 0 asks for experts 0 to 2 in turn, layer 1 for expert 3 alone: three slots and one."""
    trace = small.of([[[i % 3], [3]] for i in range(12)], [[1] * 12])
    assert slots_with_fewest_misses(stream(trace, "runtime"), trace.offsets, 4) == (3.0, 1.0)


def test_a_replayed_predictor_is_counted_like_its_recording():
    """The oracle knows the next layer: what a recording of such predictions says, too. A prompt's
    tokens are not counted, and nobody predicts the first layer."""
    trace = small.trace([[-5, 1, 1, 1], [-3, 1, 1]], top_k=2)
    predicted_ids = np.full((trace.tokens, trace.layers, 2), 255, np.uint8)
    predicted_ids[:, 1] = trace.experts[:, 1]
    recorded = recorded_activity(
        replace(trace, predictions={"by hand": Prediction(predicted_ids, 1)})
    )
    replayed = predicted_activity(trace, "oracle:1")
    assert recorded.tokens.tolist() == replayed.tokens.tolist() == [5, 5]
    assert replayed.accuracy(1)[1:3].tolist() == [1.0, 1.0]
    assert recorded.accuracy(1)[1:3].tolist() == [1.0, 1.0]
    for layer in range(2):
        assert recorded.hit_ratio(layer).tolist() == replayed.hit_ratio(layer).tolist()
    assert not predicted_activity(trace, "off").accuracy(1).any()
    with pytest.raises(UsageError, match="does not have its predictions"):
        predicted_activity(trace, "next-gate:1")
    with pytest.raises(UnknownName, match="unknown predictions 'x'"):
        recorded_activity(trace, "x")


def test_a_trace_of_prompts_alone_is_counted_whole():
    trace = small.trace([[-4], [-6]])
    assert predicted_activity(trace, "off").tokens.tolist() == [10, 10]
    assert recorded_activity(trace).tokens.tolist() == [10, 10]


def test_ratios_near_to_whole_are_none():
    """With room for all nothing is cut; with room for half, and predictions that are always right,
    bottoms fit the window that whole experts do not."""
    sure, rng = Activity([4, 4]), np.random.default_rng(1)
    for _ in range(40):
        for layer in range(2):
            chosen = rng.choice(4, 1)
            sure.token(layer, chosen, chosen)
    unsplit = CacheConfiguration.of(sure, 8, SECONDS)
    assert unsplit == CacheConfiguration((4.0, 4.0), None)
    cut = CacheConfiguration.of(sure, 4, SECONDS)
    assert sum(cut.scope) == pytest.approx(4)
    assert cut.split is not None
    assert min(cut.split) < 1
