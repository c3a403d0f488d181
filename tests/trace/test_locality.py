from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import load, locality, stream
from tests.trace import reference
from tests.trace.strategies import SETTINGS, traces
from tests.trace.test_trace import small

SHARED = Path(__file__).parents[3] / "shared" / "traces"
OVERLAP = {"olmoe-1b-7b": 0.420, "gpt-oss-20b": 0.439, "deepseek-v2-lite": 0.27}


def test_overlap_of_a_hand_worked_trace():
    """Layer 0: {0,1} {1,3} {2,1} | {3,0} {1,0}: 1, 1 and 1 of 2; layer 1: 1, 1 and 1 of 2."""
    assert locality.adjacent_overlap(small()).tolist() == [0.5, 0.5]
    assert locality.uniform_overlap(small()) == (2 / 4 + 2 / 3) / 2
    assert locality.adjacent_overlap(small().head(1)).tolist() == [0, 0]


@SETTINGS
@given(traces(), st.sampled_from([1, 3, 1 << 14]))
def test_overlap_equals_the_reference(trace, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locality, "_BLOCK", block)
        found = locality.adjacent_overlap(trace)
    assert found.tolist() == [reference.overlap(trace, layer) for layer in range(trace.layers)]


@SETTINGS
@given(traces())
def test_overlap_by_label_is_that_of_its_requests(trace):
    for label, share in locality.overlap_by_label(trace).items():
        alone = trace.select([r for r, name in enumerate(trace.labels) if name == label])
        assert share == pytest.approx(locality.adjacent_overlap(alone).mean())


@pytest.mark.parametrize("name", OVERLAP)
def test_overlap_of_real_models(name):
    path = SHARED / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"no recordings of real models at {SHARED}")
    # The published figures are those of recordings of which the file holds a part.
    found = locality.adjacent_overlap(load(path))
    assert found.mean() == pytest.approx(OVERLAP[name], abs=0.01)


def test_overlap_of_a_real_model_by_label():
    path = SHARED / "mixtral-8x7b.npz"
    if not path.is_file():
        pytest.skip(f"no recordings of real models at {SHARED}")
    found = locality.overlap_by_label(load(path))
    assert sorted(round(share, 2) for share in found.values()) == [0.34, 0.4]


def test_skew_of_a_hand_worked_trace():
    first, second = locality.skew(small())
    assert (first * 10).round(9).tolist() == [4, 7, 9, 10]  # 1 four times, 0 three, 3 two, 2 one
    assert (second * 10).round(9).tolist() == [4, 7, 10]
    assert [counts.tolist() for counts in locality.popularity(small())] == [[3, 4, 1, 2], [4, 3, 3]]


@SETTINGS
@given(traces())
def test_reuse_equals_the_reference(trace):
    uses, found = locality.reuse(trace)
    for layer in range(trace.layers):
        distances, gaps = reference.reuse(trace, layer)
        counted = uses[layer]
        assert {d: n for d, n in enumerate(counted[:-1].tolist()) if n} == dict(distances)
        assert counted[-1] == len({expert for _, expert in reference.uses(trace, layer)})
        assert {g: n for g, n in enumerate(found[layer].tolist()) if n} == dict(gaps)


@SETTINGS
@given(traces(even=True), st.integers(1, 7))
def test_reuse_distances_say_what_lru_hits(trace, slots):
    distances, _ = locality.reuse(trace)
    hits = sum(int(counts[:-1][:slots].sum()) for counts in distances)
    capacity = min(slots * trace.layers, int(trace.offsets[-1]))
    requests = stream(trace, "natural")
    lru = replay(requests, trace.offsets, capacity, policy("lru"), scope="per-layer", pin="none")
    assert lru.requests - lru.misses == hits


def test_long_gaps_are_counted_together(monkeypatch):
    monkeypatch.setattr(locality, "LONGEST_GAP", 2)
    _, gaps = locality.reuse(small())
    assert gaps[0].tolist() == [0, 3, 3]  # 1 after 1, 1, 2; 0 after 3, 1; 3 after 2
    assert locality.median(gaps[0]) == 1
    once, _ = locality.reuse(small().head(1))
    assert np.isnan(locality.median(once[0][:-1]))


@SETTINGS
@given(traces(), st.integers(1, 6))
def test_segments_equal_the_reference(trace, length):
    found = locality.segment_consistency(trace, length)
    assert found.windows == len(reference.windows(trace, length))
    if not found.windows:
        for array in (found.srp, found.per_layer, found.shared):
            assert np.isnan(array).all()
        return
    layers = range(trace.layers)
    expected = [reference.srp(trace, layer, length) for layer in layers]
    np.testing.assert_allclose(found.srp, expected)
    for slots in range(1, found.per_layer.size + 1):
        hits = [reference.sch(trace, length, slots, [layer]) for layer in layers]
        np.testing.assert_allclose(found.per_layer[slots - 1], np.mean(hits))
    for slots in range(1, found.shared.size + 1):
        hit = reference.sch(trace, length, slots, list(layers))
        np.testing.assert_allclose(found.shared[slots - 1], hit)


def test_segments_of_a_hand_worked_trace():
    """Layer 0 in windows of two: uses 0:1 1:2 3:1 | 1:2 2:1 3:1 | 0:2 1:1 3:1."""
    found = locality.segment_consistency(small(), 2)
    assert found.windows == 3
    # Experts used at least once: 12 hits of 9 groups' seats x 2 and 12 uses; twice: 6 of 6 and 12.
    assert found.srp[0] == pytest.approx(max(24 / (18 + 12), 12 / (6 + 12)))
    assert locality.segment_consistency(small(), 1).srp.tolist() == [1, 1]
    with pytest.raises(UsageError, match="at least 1 token, got 0"):
        locality.segment_consistency(small(), 0)


@SETTINGS
@given(traces())
def test_the_summary_is_json(trace):
    found = locality.summary(trace, [1, 3], [1, 2])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [part["length"] for part in found["segments"]] == [1, 3]
    assert found["segments"][0]["srp"] == 1
    assert 0 <= found["overlap"] <= 1
