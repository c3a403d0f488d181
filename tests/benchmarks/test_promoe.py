"""ProMoE's figures: the recordings in the repository, and the machine made from the paper's."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from benchmarks.papers.promoe_bench import (
    BLOCKED,
    DECODED,
    DISTANCES,
    EXPERT,
    LAYER,
    LRU,
    PROMPT,
    STATIC,
    Bench,
    Demo,
    demo_of,
    pass_seconds,
    proactive,
    shaped,
)
from greenroom.core.predictor import Shape
from greenroom.errors import UsageError
from greenroom.predictors.learned import networks_of
from tests.benchmarks.harness import FOLDER
from tests.sim import small

FILES = FOLDER / "papers" / "demo"


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(FILES, quick=True)


def test_predictor_and_recording_are_of_one_distance(demo):
    from safetensors.numpy import load_file

    for distance in DISTANCES:
        trace = demo.whole[distance]
        assert (trace.experts == demo.whole[1].experts).all()
        assert {each.distance for each in trace.predictions.values()} == {distance}
        shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
        tensors = load_file(FILES / f"k{distance}.predictor")
        networks, ahead = networks_of(tensors, shape)
        assert (len(networks), ahead) == (trace.layers - 1, distance)
    assert (demo.earlier.requests, demo.whole[1].requests) == (67, 17)


def test_requests_are_a_prompt_and_an_answer():
    trace = shaped(small.trace([[1] * 70, [1] * 64]))
    assert np.diff(trace.request_starts).tolist() == [PROMPT + DECODED] * 2
    assert np.diff(trace.pass_starts).tolist() == ([PROMPT] + [1] * DECODED) * 2
    assert np.flatnonzero(trace.pass_prefill).tolist() == [0, DECODED + 1]


def test_a_decoded_token_computes_for_a_millisecond_a_layer():
    """A prompt's layer: half a millisecond, and an eighth for each distinct expert of top-4."""
    trace = shaped(small.trace([[1] * 64], layers=3, experts=8, top_k=4))
    seconds = pass_seconds(trace)
    assert seconds[1:] == pytest.approx(3 * LAYER)
    distinct = sum(len(np.unique(trace.experts[:PROMPT, layer])) for layer in range(3))
    assert seconds[0] == pytest.approx(1.5 * LAYER + distinct * LAYER / 8)


@pytest.mark.parametrize("machine", BLOCKED)
def test_lru_with_half_of_the_experts_waits_as_long_as_in_the_paper(demo, machine):
    bench = Bench(demo, machine)
    measured = bench.measure(LRU, 0.5)
    assert measured.token_wait == pytest.approx(BLOCKED[machine])
    assert bench.costs(2.0).links[0].bandwidth == pytest.approx(EXPERT / bench.transfer / 2)


def test_the_static_set_is_as_large_as_the_share(demo):
    bench = Bench(demo, "transformers")
    chosen = bench.static_set(128)
    layers = np.searchsorted(demo.earlier.offsets, chosen, side="right") - 1
    assert np.bincount(layers).tolist() == [16] * 8
    assert bench.measure(STATIC, 1.0).token_wait < 0.05  # experts that the prompts did not use


def test_perfect_predictions_wait_least(demo):
    bench = Bench(demo, "transformers")
    waits = [bench.measure(proactive(name, 4), 0.5).tpot for name in ("perfect", "learned", "off")]
    assert waits == sorted(waits)
    assert len(set(waits)) == 3


def test_a_folder_without_recordings_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no recordings there: make them with promoe_train\.py"):
        demo_of(Namespace(demo=tmp_path, quick=True))
