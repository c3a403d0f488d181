"""Training, on routing that its inputs decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from greenroom.config import TrainConfig
from greenroom.core.predictor import LayerRouting, PassStart, Shape
from greenroom.errors import GreenroomError
from greenroom.predictors import PredictorSetup, predictor
from greenroom.runtime.recording.training import accuracy, pairs_of, train
from greenroom.trace import GateInputs, Prediction, Trace

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K, HIDDEN = 3, (8, 6, 8), 2, 12
CONFIG = TrainConfig(distance=1, hidden=32, epochs=100, held_out=0.25)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recording(requests: int = 8, length: int = 120, rate: float = 1.0) -> Trace:
    """Tokens whose experts are the two largest of some of their hidden states, which keep.

    The states of a token grow out of those of the one before, so that it can be foreseen a little.
    """
    random = np.random.default_rng(0)
    tokens = requests * length
    mixers = [random.standard_normal((HIDDEN, n)).astype(np.float32) for n in EXPERTS]
    states = np.empty((tokens, LAYERS, HIDDEN), np.float32)
    experts = np.empty((tokens, LAYERS, TOP_K), np.uint8)
    before = random.standard_normal(HIDDEN)
    for token in range(tokens):
        before = 0.9 * before + 0.4 * random.standard_normal(HIDDEN)
        for layer in range(LAYERS):
            states[token, layer] = 3 + 2 * before + 0.02 * random.standard_normal(HIDDEN)
            scores = (states[token, layer] - 3) @ mixers[layer]
            experts[token, layer] = np.argsort(-scores)[:TOP_K]
    sampled = np.flatnonzero(random.random(tokens) < rate)
    return Trace(
        experts=experts,
        experts_per_layer=np.array(EXPERTS),
        request_starts=np.arange(0, tokens + 1, length),
        pass_starts=np.arange(0, tokens + 1, length),
        pass_prefill=np.ones(requests, bool),
        labels=("",) * requests,
        gate_inputs=GateInputs(sampled, states[sampled]),
    )


def test_pairs_are_a_distance_apart() -> None:
    trace = recording(requests=2, length=4)
    for target, distance, source in ((1, 1, 0), (2, 1, 1), (2, 2, 0)):
        pairs = pairs_of(trace, target, distance)
        assert pairs.source == source
        assert pairs.rows.tolist() == pairs.tokens.tolist() == list(range(8))
    for target, distance, source in ((0, 1, 2), (0, 3, 0), (1, 2, 2)):
        pairs = pairs_of(trace, target, distance)
        assert pairs.source == source
        assert pairs.rows.tolist() == [0, 1, 2, 4, 5, 6]  # the last of a request has none after it
        assert pairs.tokens.tolist() == [1, 2, 3, 5, 6, 7]


def test_pairs_of_a_sample_need_only_the_inputs_of_the_first() -> None:
    trace = recording(requests=2, length=4)
    sampled = np.array([0, 3, 5])
    trace = replace(trace, gate_inputs=GateInputs(sampled, trace.gate_inputs.values[sampled]))
    inside, wrapped = pairs_of(trace, 1, 1), pairs_of(trace, 0, 1)
    assert (inside.rows.tolist(), inside.tokens.tolist()) == ([0, 1, 2], [0, 3, 5])
    assert (wrapped.rows.tolist(), wrapped.tokens.tolist()) == ([0, 2], [1, 6])


def test_learns_what_the_inputs_decide_and_judges_by_other_requests() -> None:
    trace = recording(rate=0.8)
    done: list[int] = []
    trained = train(trace, CONFIG, CPU, done.append)
    assert done == [1, 2, 3]
    learned, popularity = trained.accuracy["learned"], trained.accuracy["popularity"]
    assert min(learned[1:]) > 0.75  # the same token's states
    assert 0.4 < learned[0] < min(learned[1:])  # those of the token before
    assert max(popularity) < min(learned)
    assert trained.tokens + trained.held_out == len(trace.gate_inputs.tokens)
    assert 0.15 < trained.held_out / trained.tokens < 0.5


def test_a_trained_predictor_has_the_reported_accuracy() -> None:
    """This also shows that the standardisation of the inputs is in the weights."""
    trace = recording()
    trained = train(trace, CONFIG, CPU)
    it = predictor("learned").build(PredictorSetup(Shape(EXPERTS, TOP_K), tensors=trained.tensors))
    predicted = np.empty((trace.tokens, TOP_K), np.int64)
    for token, inputs in enumerate(trace.gate_inputs.values):
        it.begin(PassStart(0, token, 1, False))
        it.observe(LayerRouting(0, trace.experts[token, :1].astype(np.int64), None, inputs[:1]))
        (guess,) = it.predict(0)
        predicted[token] = guess.experts[0, :TOP_K]
    right = accuracy(predicted, trace.experts[:, 1].astype(np.int64))
    assert right == pytest.approx(trained.accuracy["learned"][1], abs=0.08)


def test_training_is_repeatable() -> None:
    trace = recording(requests=4)
    config = replace(CONFIG, epochs=2)
    first, second = (train(trace, config, CPU) for _ in range(2))
    other = train(trace, replace(config, seed=1), CPU)
    assert first.accuracy == second.accuracy
    for name, array in first.tensors.items():
        np.testing.assert_array_equal(array, second.tensors[name])
    assert not np.array_equal(first.tensors["0.up.weight"], other.tensors["0.up.weight"])


def test_the_accuracy_of_recorded_predictions_is_reported_too() -> None:
    trace = recording(requests=4)
    right = np.pad(trace.experts, ((0, 0), (0, 0), (0, 2)), constant_values=255)
    wrong = np.roll(trace.experts, 40, axis=0)
    recorded = {"right": (right, 1), "wrong": (wrong, 1), "far": (right, 2)}
    trace = replace(
        trace, predictions={n: Prediction(*prediction) for n, prediction in recorded.items()}
    )
    result = train(trace, replace(CONFIG, epochs=1), CPU).accuracy
    assert result.keys() == {"learned", "right", "wrong", "popularity"}
    assert result["right"] == [1.0] * LAYERS
    assert max(result["wrong"]) < 0.6


@pytest.mark.parametrize(
    ("trace", "config", "message"),
    [
        (replace(recording(2, 4), gate_inputs=None), CONFIG, "record it with --gate-inputs 1"),
        (recording(2, 4), replace(CONFIG, distance=4), "has 3 MoE layers only"),
        (recording(1, 40), CONFIG, "the trace has one request"),
        (recording(2, 20), CONFIG, "tokens for training"),
    ],
)
def test_traces_unfit_for_training_are_refused(
    trace: Trace, config: TrainConfig, message: str
) -> None:
    with pytest.raises(GreenroomError, match=message) as error:
        train(trace, config, CPU)
    assert "\n" not in str(error.value)
