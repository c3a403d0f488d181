"""The recorder, at modules that route by a script instead of a gate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Shape
from greenroom.errors import TraceError
from greenroom.runtime.probes import GateInputProbe, Router
from greenroom.runtime.recording import recorder as recording
from greenroom.runtime.recording.forecasts import ForecastRecorder
from greenroom.runtime.recording.recorder import Recorder
from greenroom.trace import load, stream
from greenroom.trace.journal import Journal
from greenroom.trace.segments import Header

SIZES = (4, 3)


class Experts(nn.Module):
    """Takes what an experts module takes, and does nothing with it."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class Model:
    """Two layers; a pass is given the ids of its tokens and their experts."""

    def __init__(self, named: bool = False) -> None:
        self.embedding, self.layers = nn.Embedding(100, 5), [Experts() for _ in SIZES]
        self.named, self.routed = named, []

    @torch.no_grad()
    def __call__(self, ids: list[int], experts: list[list[list[int]]], layers=(0, 1)) -> None:
        x = self.embedding(torch.tensor([ids]))[0]
        for layer in layers:
            index = torch.tensor([row[layer] for row in experts])
            weights = index / 10
            hidden = x + layer
            self.routed.append(hidden.numpy())
            if self.named:
                self.layers[layer](hidden, top_k_weights=weights, top_k_index=index)
            else:
                self.layers[layer](hidden, index, weights)


PROMPT = [[[0, 1], [0, 2]], [[1, 3], [1, 0]], [[2, 1], [2, 0]]]
TOKEN = [[[3, 0], [0, 1]]]


@pytest.fixture
def start(tmp_path):
    """`start(model, weights=True, ...)`: a recorder whose journal is at tmp_path / "j"."""
    opened = []

    def make(model: Model, **fields) -> Recorder:
        journal = Journal(tmp_path / "j", Header(SIZES, **fields))
        opened.append((Recorder(model.layers, model.embedding, journal), journal))
        return opened[-1][0]

    yield make
    for recorder, journal in opened:
        recorder.__exit__()
        journal.close()


@pytest.mark.parametrize("named", [False, True])
def test_the_choices_of_all_layers_are_recorded(start, tmp_path, named):
    model = Model(named)
    recorder = start(model, weights=True, token_ids=True)
    for number, label in enumerate(["a", "b"]):
        with recorder.request(number, label, prompt_tokens=3):
            model([7, 8, 9], PROMPT)
            model([5 + number], TOKEN)
    trace = load(tmp_path / "j")
    assert trace.experts.tolist() == (PROMPT + TOKEN) * 2
    assert trace.token_ids.tolist() == [7, 8, 9, 5, 7, 8, 9, 6]
    assert trace.request_starts.tolist() == [0, 4, 8]
    assert trace.pass_starts.tolist() == [0, 3, 4, 7, 8]
    assert trace.pass_prefill.tolist() == [True, False] * 2
    assert trace.labels == ("a", "b")
    np.testing.assert_allclose(trace.weights, trace.experts / 10, atol=1e-3)
    assert trace.gate_inputs is None
    assert recorder.tokens == 8
    steps = stream(trace, "runtime")
    assert np.diff(steps.starts).tolist() == [4, 3, 2, 2] * 2


def test_a_prompt_in_blocks_is_prefill_to_its_end(start, tmp_path):
    model = Model()
    with start(model).request(0, "", prompt_tokens=5):
        model([1, 2, 3], PROMPT)
        model([4, 5], PROMPT[:2])
        model([6], TOKEN)
    assert load(tmp_path / "j").pass_prefill.tolist() == [True, True, False]


def test_only_what_runs_inside_a_request_is_recorded(start, tmp_path):
    model = Model()
    with start(model) as recorder:
        model([1], TOKEN)
        with recorder.request(0, "", 1):
            model([2], TOKEN)
        model([3], TOKEN)
    model([4], TOKEN)
    assert load(tmp_path / "j").tokens == 1
    assert not model.layers[0]._forward_pre_hooks
    assert not model.embedding._forward_pre_hooks


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_gate_inputs_are_those_of_the_tokens_that_are_named(start, tmp_path, monkeypatch, rate):
    monkeypatch.setattr(recording, "FLUSH_BYTES", 200)  # several segments a request
    model = Model()
    recorder = start(model, gate_inputs=rate)
    for number in range(4):
        with recorder.request(number, "", 3):
            model([7, 8, 9], PROMPT)
            for token in range(10):
                model([token], TOKEN)
    sample = load(tmp_path / "j").gate_inputs
    pairs = [np.stack(pair, 1) for pair in zip(model.routed[::2], model.routed[1::2], strict=True)]
    np.testing.assert_array_equal(sample.values, np.concatenate(pairs)[sample.tokens])
    assert abs(len(sample.tokens) / 52 - rate) < 0.2


def test_memory_is_bounded_by_flushing(start, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH_BYTES", 100)
    model = Model()
    recorder = start(model)
    sizes = []
    with recorder.request(0, "", 1):
        for _ in range(60):
            model([1], TOKEN)
            sizes.append((tmp_path / "j").stat().st_size)
            assert len(recorder._passes) < 20
    assert len(set(sizes)) >= 4
    assert load(tmp_path / "j").tokens == 60
    assert load(tmp_path / "j").requests == 1


def test_old_passes_are_flushed_too(start, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH_S", -1.0)
    model = Model()
    with start(model).request(0, "", 1):
        for requested in range(1, 7):
            model([1], TOKEN)
            if requested > 2:  # one is under way, and one waits for company
                assert load(tmp_path / "j").tokens == requested - 2


def test_after_an_error_the_complete_passes_are_stored(start, tmp_path):
    model = Model()
    recorder = start(model)

    def broken() -> None:
        model([1, 2, 3], PROMPT)
        model([4], TOKEN)
        model([5], TOKEN, layers=(0,))
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"), recorder.request(0, "a", 3):
        broken()
    trace = load(tmp_path / "j")
    assert trace.tokens == 4
    assert trace.meta == {"last_request": "cut short"}
    with recorder.request(1, "b", 1):
        model([1], TOKEN)


@pytest.mark.parametrize(
    ("experts", "layers", "message"),
    [
        ([[[0, 1], [0, 3]]], (0, 1), "or an expert that the layer does not have"),
        ([[[1, 1], [0, 1]]], (0, 1), "chose an expert twice for one token"),
        ([[[0, 1], [0]]], (0, 1), "cannot store different top-k"),
        ([[[0, 1], [0, 1]]], (1,), "ran MoE layer 1 after 0 others"),
        ([[[0, 1], [0, 1]]], (0,), "used 1 of the 2 MoE layers"),
    ],
)
def test_routing_that_a_trace_cannot_store_is_refused(start, experts, layers, message):
    model = Model()
    recorder = start(model)
    with pytest.raises(TraceError, match=message), recorder.request(0, "", 1):
        model([1], experts, layers)


def test_shapes_alone_are_not_recorded(start, tmp_path):
    model = Model()
    recorder = start(model)
    with recorder.request(0, "", 1):
        index = torch.zeros(1, 2, dtype=torch.int64)
        model.layers[0](torch.empty(1, 5, device="meta"), index, index)
        model([1], TOKEN)
    assert load(tmp_path / "j").tokens == 1


class Gate(nn.Module):
    """A router in name, whose states are not those that the experts are given."""

    def forward(self, hidden_states):
        return hidden_states


class Gated(Model):
    """The same model, with a gate in each layer that is asked before the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [Gate() for _ in SIZES]
        for layer, gate in zip(self.layers, self.gates, strict=True):
            layer.register_forward_pre_hook(lambda _, args, gate=gate: (gate(args[0] * 3), None)[1])

    def probe(self) -> GateInputProbe:
        return GateInputProbe([Router(gate, nn.Module(), 4) for gate in self.gates])


class Echo:
    """Predicts what was just seen: of the first layer where its pass begins."""

    name, distance, width = "echo", 1, 3

    def begin(self, at: PassStart) -> None:
        self.at = at

    def observe(self, pairs: LayerRouting) -> None:
        self.routed = pairs

    def predict(self, layer: int) -> list[LayerPrediction]:
        if layer < 0:
            return [LayerPrediction(0, np.full((self.at.tokens, 2), self.at.first % 4))]
        rows = len(self.routed.experts) if layer + 1 < len(SIZES) else 1
        return [LayerPrediction(layer + 1, np.tile(self.routed.experts[-1:], (rows, 1)) % 3)]


def test_gate_inputs_and_predictions_are_those_of_the_gates(tmp_path):
    model = Gated()
    journal = Journal(tmp_path / "j", Header(SIZES, gate_inputs=1.0, predictions={"echo": 1}))
    echo = Echo()
    forecasts = ForecastRecorder({"echo": echo}, Shape(SIZES, 2))
    with Recorder(model.layers, model.embedding, journal, 0, model.probe(), forecasts) as recorder:
        for number in range(2):
            with recorder.request(number, "", 3):
                model([7, 8, 9], PROMPT)
                assert echo.at == (number, 4 * number, 3, True, echo.at.token_ids, None)
                assert echo.at.token_ids.tolist() == [7, 8, 9]
                model([5], TOKEN)
                assert echo.at == (number, 4 * number + 3, 1, False, echo.at.token_ids, None)
                np.testing.assert_array_equal(echo.routed.inputs, model.routed[-1] * 3)
                np.testing.assert_allclose(echo.routed.weights, [[0.0, 0.1]])
    journal.close()
    assert not model.gates[0]._forward_pre_hooks
    trace = load(tmp_path / "j")
    pairs = [np.stack(pair, 1) for pair in zip(model.routed[::2], model.routed[1::2], strict=True)]
    np.testing.assert_allclose(trace.gate_inputs.values, np.concatenate(pairs) * 3)
    predicted = trace.predictions["echo"].experts
    assert trace.predictions["echo"].distance == 1
    begins = [[0, 0], [0, 0], [0, 0], [2, 0]]  # the last: layer 1's of the token before it
    assert (predicted[..., 2] == 255).all()  # two were named, there is room for three
    predicted = predicted[..., :2]
    assert predicted[:, 0].tolist() == begins * 2
    assert predicted[:, 1].tolist() == [[2, 1]] * 3 + [[0, 0]] + [[2, 1]] * 3 + [[0, 0]]
