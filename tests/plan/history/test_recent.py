"""The routing of the latest tokens: whole passes of single sequences, the oldest forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.plan.history import recent
from greenroom.plan.history.recent import RecentRouting, recent_trace
from greenroom.plan.history.routing import Arrays, RoutingHistory

OFFSETS, SIZES = (0, 8, 16), (8, 8)


def rows(*tokens: tuple[int, int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def history_of(state: Arrays | None) -> RoutingHistory:
    states = {} if state is None else {recent.NAME: state}
    return RoutingHistory(np.empty(0, np.int64), np.zeros(16), states)


def observed_routing(
    *passes: tuple[int, bool, list[np.ndarray]], before: RoutingHistory | None = None
) -> RecentRouting:
    recorder = RecentRouting(OFFSETS, before)
    for request, prompt, layers in passes:
        recorder.on_pass(request, prompt, 1)
        for layer, experts in enumerate(layers):
            recorder.on_routing(layer, experts)
    return recorder


def test_passes_become_a_recording():
    recorder = observed_routing(
        (1, True, [rows((0, 1), (2, 3)), rows((4, 5), (6, 7))]),
        (1, False, [rows((1, 2)), rows((3, 4))]),
        (2, False, [rows((7, 0)), rows((0, 7))]),
    )
    trace = recent_trace(history_of(recorder.state()), SIZES)
    assert trace is not None
    assert trace.experts.tolist() == [
        [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[1, 2], [3, 4]], [[7, 0], [0, 7]]
    ]  # fmt: skip
    assert trace.pass_starts.tolist() == [0, 2, 3, 4]
    assert trace.pass_prefill.tolist() == [True, False, False]
    assert trace.request_starts.tolist() == [0, 3, 4]


def test_another_run_goes_on_with_requests_of_its_own():
    one = (1, False, [rows((0, 1)), rows((2, 3))])
    first = history_of(observed_routing(one).state())
    trace = recent_trace(history_of(observed_routing(one, before=first).state()), SIZES)
    assert trace is not None
    assert trace.requests == trace.tokens == 2


@pytest.mark.parametrize(
    "layers",
    [
        [rows((0, 1))],  # a layer was not heard
        [rows((0, 1)), rows((0, 1), (2, 3))],  # of another length
        [rows((0, 1)), rows((0, 8))],  # a token that no expert serves
    ],
)
def test_a_pass_that_is_not_whole_is_left_out(layers: list[np.ndarray]):
    assert observed_routing((1, False, layers)).state() is None


def test_passes_of_several_sequences_are_left_out():
    recorder = RecentRouting(OFFSETS, None)
    recorder.on_pass(1, False, 2)
    for layer in (0, 1):
        recorder.on_routing(layer, rows((0, 1), (2, 3)))
    assert recorder.state() is None


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recent, "TOKENS", 4)
    passes = [(n, False, [rows((n, 7)), rows((n, 7))]) for n in range(6)]
    trace = recent_trace(history_of(observed_routing(*passes).state()), SIZES)
    assert trace is not None
    assert trace.experts[:, 0, 0].tolist() == [2, 3, 4, 5]
    long = [rows(*((i, 7) for i in range(6)))] * 2
    trace = recent_trace(history_of(observed_routing((1, True, long)).state()), SIZES)
    assert trace is not None
    assert trace.experts[:, 0, 0].tolist() == [2, 3, 4, 5]


def test_what_is_of_another_model_or_damaged_is_passed_over():
    state = dict(observed_routing((1, False, [rows((0, 1)), rows((2, 3))])).state() or {})
    assert recent_trace(history_of(state), SIZES) is not None
    assert recent_trace(history_of(state), (8, 8, 8)) is None
    assert recent_trace(history_of(state), (2, 2)) is None
    assert recent_trace(history_of({}), SIZES) is None
    assert recent_trace(history_of(None), SIZES) is None
    assert recent_trace(history_of({**state, "lengths": np.array([3])}), SIZES) is None
    assert recent_trace(history_of({**state, "requests": np.array([], np.int64)}), SIZES) is None
    twice = {**state, "experts": np.zeros((1, 2, 2), np.uint16)}
    assert recent_trace(history_of(twice), SIZES) is None
    assert recent_trace(None, SIZES) is None
    assert RecentRouting(OFFSETS, history_of(twice)).state() is None  # and begins anew
