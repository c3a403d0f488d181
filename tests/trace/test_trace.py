from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import TraceError
from greenroom.trace import GateInputs, Prediction, Trace
from tests.trace.strategies import SETTINGS, assert_same, traces


def small(**changes) -> Trace:
    """Five tokens in two requests, the first with a prefill pass of two; 2 layers of 4 and 3."""
    fields = {
        "experts": np.array(
            [
                [[0, 1], [0, 2]],
                [[1, 3], [1, 0]],
                [[2, 1], [2, 0]],
                [[3, 0], [0, 1]],
                [[1, 0], [1, 2]],
            ],
            np.uint8,
        ),
        "experts_per_layer": np.array([4, 3]),
        "request_starts": np.array([0, 3, 5]),
        "pass_starts": np.array([0, 2, 3, 4, 5]),
        "pass_prefill": np.array([True, False, False, False]),
        "labels": ("a", "b"),
    }  # fmt: skip
    return Trace(**{**fields, **changes})


def test_what_a_trace_says_of_itself():
    trace = small()
    assert (trace.tokens, trace.layers, trace.top_k) == (5, 2, 2)
    assert (trace.requests, trace.passes) == (2, 4)
    assert trace.offsets.tolist() == [0, 4, 7]


NO = np.zeros(9, np.bool_)


def inputs(tokens: list[int], layers: int) -> GateInputs:
    return GateInputs(np.array(tokens), np.zeros((len(tokens), layers, 3), np.float32))


def norms(shape: list[int], last: float = 1.0) -> np.ndarray:
    values = np.ones(shape, np.float32)
    values[-1, -1] = last
    return values


def changed(at, value):
    experts = small().experts.copy()
    experts[at] = value
    return {"experts": experts}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (changed((2, 1, 0), 3), "token 2 has expert 3 in layer 1, which has 3 experts (0 to 2)"),
        (changed((3, 0, 1), 3), "token 3 has the expert 3 of layer 0 twice"),
        ({"experts": np.zeros((5, 2, 2), np.int64)}, "uint8 or uint16"),
        ({"experts": np.zeros((0, 2, 2), np.uint8)}, "the array experts is empty"),
        ({"experts_per_layer": np.array([4])}, "one entry for each of the 2 layers"),
        ({"request_starts": np.array([0, 3, 3, 5])}, "request 1 has no tokens"),
        ({"request_starts": np.array([0, 4, 3, 5])}, "must ascend, but has 3 after 4"),
        ({"request_starts": np.array([0, 3, 6])}, "must begin with 0 and end with 5"),
        ({"request_starts": np.array([1, 3, 5])}, "first token of each request, must"),
        ({"request_starts": np.array([], np.int64)}, "first token of each request, must"),
        ({"pass_starts": np.array([0, 2, 4, 4, 5])}, "pass 2 has no tokens"),
        ({"pass_starts": np.array([0, 2, 4, 5]), "pass_prefill": NO[:3]}, "one request only"),
        ({"labels": ("a",)}, "1 labels, but must have one for each of the 2"),
        ({"pass_prefill": NO[:3]}, "pass_prefill has shape [3]"),
        ({"weights": np.zeros((5, 2, 1), np.float16)}, "weights has shape [5, 2, 1]"),
        ({"token_ids": np.zeros(4, np.int32)}, "token_ids has shape [4], but must have shape [5]"),
        ({"output_norms": norms([5, 2])}, "output_norms has shape [5, 2], but must have shape [5,"),
        ({"token_changes": norms([5, 1])}, "token_changes has shape [5, 1], but must have shape"),
        ({"output_norms": norms([5, 2, 2], np.nan)}, "token 4 has nan in output_norms of layer 1"),
        ({"token_changes": norms([5, 2], -0.5)}, "token 4 has -0.5 in token_changes of layer 1"),
        ({"gate_inputs": inputs([5], 2)}, "gate_inputs.tokens"),
        ({"gate_inputs": inputs([1, 1], 2)}, "ascend"),
        ({"gate_inputs": inputs([1], 1)}, "gate_inputs.values"),
        ({"predictions": {"p": Prediction(np.full((5, 2, 1), 3, np.uint8), 1)}}, "prediction p"),
        ({"predictions": {"p": Prediction(np.zeros((4, 2, 1), np.uint8), 1)}}, "prediction p"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(changes, words):
    with pytest.raises(TraceError) as error:
        small(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prediction_may_be_missing():
    nothing = np.full((5, 2, 1), 255, np.uint8)
    assert small(predictions={"p": Prediction(nothing, 1)}).predictions["p"].distance == 1


def test_an_id_out_of_range_far_into_a_trace_is_found():
    experts = np.zeros((200_000, 1, 1), np.uint8)
    experts[170_000] = 9
    starts = np.array([0, 200_000])
    with pytest.raises(TraceError, match="token 170000 has expert 9 in layer 0"):
        Trace(experts, np.array([9]), starts, starts, np.array([True]), ("",))


def test_head_cuts_the_last_pass_and_request():
    head = small().head(4)
    assert head.request_starts.tolist() == [0, 3, 4]
    assert head.pass_starts.tolist() == [0, 2, 3, 4]
    assert head.labels == ("a", "b")
    one = small().head(1)
    assert (one.requests, one.passes, one.labels) == (1, 1, ("a",))
    assert small().head(9).tokens == 5
    with pytest.raises(TraceError, match="at least 1 token"):
        small().head(0)


def test_select_takes_requests_in_the_order_given():
    swapped = small().select([1, 0])
    assert swapped.labels == ("b", "a")
    assert swapped.request_starts.tolist() == [0, 2, 5]
    assert swapped.pass_starts.tolist() == [0, 1, 2, 4, 5]
    assert swapped.pass_prefill.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(swapped.experts, small().experts[[3, 4, 0, 1, 2]])
    for wrong in ([], [2], [-1]):
        with pytest.raises(TraceError):
            small().select(wrong)


@SETTINGS
@given(traces(), st.data())
def test_selecting_twice_brings_back_what_was(trace, data):
    order = data.draw(st.permutations(range(trace.requests)))
    back = trace.select(order).select(np.argsort(order))
    assert_same(back, trace)
    assert_same(trace.select(range(trace.requests)), trace)


@SETTINGS
@given(traces(), st.integers(1, 30))
def test_a_head_holds_the_first_tokens_of_everything(trace, tokens):
    head = trace.head(tokens)
    kept = min(tokens, trace.tokens)
    np.testing.assert_array_equal(head.experts, trace.experts[:kept])
    if trace.gate_inputs is not None:
        inside = trace.gate_inputs.tokens < kept
        np.testing.assert_array_equal(head.gate_inputs.tokens, trace.gate_inputs.tokens[inside])
        np.testing.assert_array_equal(head.gate_inputs.values, trace.gate_inputs.values[inside])
    assert head.request_starts.tolist() == [
        s for s in trace.request_starts.tolist() if s < kept
    ] + [kept]


def test_a_trace_is_frozen():
    with pytest.raises(AttributeError):
        small().labels = ()  # type: ignore[misc]
    assert replace(small(), meta={"model": "m"}).meta == {"model": "m"}
