"""Training, on routing that its inputs decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from greenroom.config import TrainConfig
from greenroom.core.predictor import LayerRouting, PassStart, Shape
from greenroom.errors import GreenroomError, UsageError
from greenroom.predictors import PredictorSetup, predictor
from greenroom.runtime.recording.training import accuracy, hidden_size, result_metadata, train
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


def one_layer() -> Trace:
    trace = recording(2, 4)
    inputs = GateInputs(trace.gate_inputs.tokens, trace.gate_inputs.values[:, :1])
    return replace(
        trace, experts=trace.experts[:, :1], experts_per_layer=np.array([8]), gate_inputs=inputs
    )


def test_networks_have_the_size_of_the_paper_s() -> None:
    """2 million parameters in two layers: weights of both, and the biases."""
    assert hidden_size(2048, 64) == 944  # DeepSeek-V2-Lite: 2048 x 944 + 944 x 64 + 944 + 64
    assert hidden_size(4096, 8) == 480  # Mixtral
    assert hidden_size(160, 32) == 1024  # a narrow model does not get a wider network
    assert hidden_size(3_000_000, 8) == 16
    trace = recording(requests=4)
    trained = train(trace, replace(CONFIG, hidden=None, epochs=1), CPU)
    assert trained.hidden == len(trained.tensors["1.up.bias"]) == 1024
    assert train(trace, replace(CONFIG, epochs=1), CPU).hidden == 32


def test_the_first_layers_learn_from_the_input_of_layer_0() -> None:
    """Each layer's inputs decide its own experts only, and layer 1 has those of layer 0 reversed.

    With distance 2 the networks of layers 1 and 2 both read layer 0's input (ProMoE, footnote 1).
    """
    trace = recording()
    random = np.random.default_rng(1)
    values = random.standard_normal(trace.gate_inputs.values.shape).astype(np.float32)
    experts = trace.experts.copy()
    experts[:, 1] = np.argsort(-values[:, 0, :6])[:, :TOP_K]
    experts[:, 2] = np.argsort(values[:, 0, :8])[:, :TOP_K]
    inputs = GateInputs(trace.gate_inputs.tokens, values)
    trace = replace(trace, gate_inputs=inputs, experts=experts)
    near = train(trace, CONFIG, CPU).accuracy["learned"]
    far = train(trace, replace(CONFIG, distance=2), CPU).accuracy["learned"]
    assert near[0] is far[0] is None
    assert near[1] > 0.75 > 0.4 > near[2]  # at distance 1, layer 2 reads layer 1's input
    assert min(far[1:]) > 0.75


def test_the_number_of_training_tokens_is_bounded() -> None:
    trace = recording(requests=4)
    config = replace(CONFIG, epochs=1, tokens=100)
    trained = train(trace, config, CPU)
    assert trained.tokens == 100
    assert trained.held_out == 120  # all tokens of one request
    again = train(trace, config, CPU)
    np.testing.assert_array_equal(trained.tensors["1.up.weight"], again.tensors["1.up.weight"])


def test_learns_what_the_inputs_decide_and_judges_by_other_requests() -> None:
    trace = recording(rate=0.8)
    done: list[int] = []
    trained = train(trace, CONFIG, CPU, done.append)
    assert done == [2, 3]
    assert "0.up.weight" not in trained.tensors  # layer 0 is not predicted
    learned, popularity = trained.accuracy["learned"], trained.accuracy["popularity"]
    assert learned[0] is popularity[0] is None
    assert min(learned[1:]) > 0.75
    assert max(popularity[1:]) < min(learned[1:])
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
    assert not np.array_equal(first.tensors["1.up.weight"], other.tensors["1.up.weight"])


def test_the_accuracy_of_recorded_predictions_is_reported_too() -> None:
    trace = recording(requests=4)
    right = np.pad(trace.experts, ((0, 0), (0, 0), (0, 2)), constant_values=255)
    wrong = np.roll(trace.experts, 40, axis=0)
    recorded = {"right": (right, 1), "wrong": (wrong, 1), "far": (right, 2), "learned": (wrong, 1)}
    without = train(trace, replace(CONFIG, epochs=1), CPU).accuracy
    trace = replace(
        trace, predictions={n: Prediction(*prediction) for n, prediction in recorded.items()}
    )
    result = train(trace, replace(CONFIG, epochs=1), CPU).accuracy
    assert result.keys() == {"learned", "right", "wrong", "popularity"}
    assert result["right"] == [None, 1.0, 1.0]
    assert max(result["wrong"][1:]) < 0.6
    assert result["learned"] == without["learned"]  # that of the training, not an earlier one's


def test_next_gate_predicts_the_layers_for_which_it_is_more_accurate() -> None:
    """At distance 2 layer 1 is compared with next-gate:1, which also reads layer 0."""
    trace = recording(requests=4)
    right = np.pad(trace.experts, ((0, 0), (0, 0), (0, 2)), constant_values=255)
    wrong = np.full_like(right, 255)
    config = replace(CONFIG, distance=2, epochs=1, next_gate=True)

    def layers(**predictions: tuple[np.ndarray, int]) -> list[int]:
        recorded = {n.replace("_", "-"): Prediction(*p) for n, p in predictions.items()}
        trained = train(replace(trace, predictions=recorded), config, CPU)
        return result_metadata(trace, config, trained)["next_gate"]

    assert layers(next_gate=(right, 1), far=(right, 2), **{"next_gate:2": (wrong, 2)}) == [1]
    assert layers(next_gate=(wrong, 1), **{"next_gate:2": (right, 2)}) == [2]
    assert layers(**{"next_gate:2": (right, 2)}) == [2]  # nothing is known of layer 1
    assert layers(**{"next_gate:2": (wrong, 2)}) == []
    with pytest.raises(UsageError, match="no predictions of next-gate:2: record it with --predict"):
        layers(next_gate=(right, 1))
    config = replace(config, next_gate=False)
    assert layers(next_gate=(right, 1), **{"next_gate:2": (right, 2)}) == []


@pytest.mark.parametrize(
    ("trace", "config", "message"),
    [
        (replace(recording(2, 4), gate_inputs=None), CONFIG, "record it with --gate-inputs 1"),
        (
            recording(2, 4),
            replace(CONFIG, distance=3),
            "--distance 3: the model has 3 MoE layers only, so the distance can be at most 2",
        ),
        (one_layer(), CONFIG, "the model has one MoE layer"),
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
