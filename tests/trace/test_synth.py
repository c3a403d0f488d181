from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.config import TopicsConfig, ZipfConfig
from greenroom.errors import UsageError
from greenroom.trace import locality, synth
from tests.trace.strategies import assert_same

TOPICS = TopicsConfig(layers=3, experts=16, top_k=4, tokens=4000, requests=20)


@pytest.mark.parametrize(("a", "b"), [(2.0, 0.0), (1.0, 3.0), (0.0, 0.0), (8.0, 0.5)])
def test_zipf_frequencies_follow_the_law(a, b):
    trace = synth.zipf(ZipfConfig(layers=4, experts=8, tokens=20_000, a=a, b=b, seed=3))
    law = 1 / (np.arange(1, 9) + b) ** a
    for counts in locality.popularity(trace):
        np.testing.assert_allclose(counts / 20_000, law / law.sum(), atol=0.015)


def test_zipf_draws_more_experts_one_after_another():
    """P(second = j) = sum over the first i of p_i p_j / (1 - p_i)."""
    trace = synth.zipf(ZipfConfig(layers=1, experts=4, top_k=2, tokens=60_000, a=1.5))
    p = 1 / np.arange(1, 5) ** 1.5
    p /= p.sum()
    second = [sum(p[i] * p[j] / (1 - p[i]) for i in range(4) if i != j) for j in range(4)]
    found = np.bincount(trace.experts[:, 0, 1], minlength=4) / 60_000
    np.testing.assert_allclose(found, second, atol=0.01)


@pytest.mark.parametrize(
    ("make", "options"), [(synth.zipf, ZipfConfig(tokens=50)), (synth.topics, TOPICS)]
)
def test_a_seed_repeats_a_trace(make, options):
    assert_same(make(options), make(options))
    other = make(replace(options, seed=1))
    assert (other.experts != make(options).experts).any()


def test_requests_and_passes():
    trace = synth.zipf(ZipfConfig(tokens=11, requests=3, prompt_tokens=2))
    assert trace.request_starts.tolist() == [0, 3, 7, 11]
    assert trace.pass_starts.tolist() == [0, 2, 3, 5, 6, 7, 9, 10, 11]
    assert trace.pass_prefill.tolist() == [True, False, True, False, False, True, False, False]
    assert trace.meta["prompt_tokens"] == 2


def overlap(**changes) -> float:
    trace = synth.topics(replace(TOPICS, **changes))
    return float(locality.adjacent_overlap(trace).mean())


def test_stickiness_is_overlap():
    assert overlap(stickiness=0, skew=0) == pytest.approx(4 / 16, abs=0.02)
    assert overlap(stickiness=1) == 1
    assert overlap(stickiness=0.5, skew=0) > 0.5


def test_a_request_keeps_to_its_topic_and_drift_leaves_it():
    def apart(drift: float) -> float:
        """How far the use of experts moves within one topic, from first to last requests."""
        trace = synth.topics(
            TopicsConfig(
                layers=2, experts=16, top_k=2, topics=1, tokens=20_000, requests=40, drift=drift
            )
        )
        first, last = (
            np.concatenate(locality.popularity(trace.select(part)))
            for part in (range(10), range(30, 40))
        )
        return float(np.abs(first - last).sum() / (first + last).sum())

    assert apart(0) < 0.1 < apart(0.05)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (ZipfConfig, {"top_k": 9}, "--top-k 9 is more than the 8 experts"),
        (ZipfConfig, {"layers": 0}, "--layers must be at least 1"),
        (ZipfConfig, {"a": -1}, "--a must be at least 0"),
        (ZipfConfig, {"a": float("nan")}, "--a must be at least 0"),
        (ZipfConfig, {"experts": 70_000}, "--experts must be at most 65536"),
        (ZipfConfig, {"requests": 10_001}, "--requests 10001 is more than --tokens 10000"),
        (ZipfConfig, {"prompt_tokens": 10_001}, "a request has only 10000 tokens"),
        (TopicsConfig, {"topics": 0}, "--topics must be at least 1"),
        (TopicsConfig, {"stickiness": 1.1}, "--stickiness must be at most 1"),
        (TopicsConfig, {"drift": -0.1}, "--drift must be at least 0"),
        (TopicsConfig, {"seed": -1}, "--seed must be at least 0"),
    ],
)
def test_options_that_cannot_be(config, options, words):
    with pytest.raises(UsageError) as error:
        config(**options)
    assert words in str(error.value)
