from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.errors import BudgetError, UnknownName, UsageError
from greenroom.policies import policy
from greenroom.sim import pinned
from greenroom.sim.pinned import expert_scores, hot_experts, pinned_by_step
from greenroom.sim.replay import replay
from greenroom.trace import stream
from tests.sim import small

PASSES = [[-3, 1, 1, 1], [-2, 1, 1], [-3, 1], [1, 1, 1]]


def labelled(seed: int = 0):
    return dataclasses.replace(small.trace(PASSES, seed=seed), labels=("a", "b", "a", "b"))


def test_hot_experts_are_those_that_a_task_uses_most():
    trace = small.of([[[0, 1]], [[0, 2]], [[3, 2]], [[3, 2]]], [[1, 1], [1, 1]])
    trace = dataclasses.replace(trace, labels=("a", "b"))
    hot = hot_experts(trace, ["a", "b"], 0.25)
    assert hot.tasks["a"].experts.tolist() == [0]
    assert hot.tasks["b"].experts.tolist() == [2]
    assert hot.tasks["a"].pattern.tolist() == [1.0, 0.5, 0.5, 0.0]


def weighted():
    """Expert 1 has a quarter of two tokens' weights, 0 and 2 have the rest; the third has none."""
    trace = small.of([[[1, 0]], [[1, 2]], [[3, 1]]], [[1, 1, 1]])
    weights = np.array([[[1, 3]], [[0.25, 0.75]], [[0, 0]]], np.float16)
    return dataclasses.replace(trace, labels=("a",), weights=weights)


def test_tcess_is_the_mean_share_of_a_tokens_gate_weights():
    trace = weighted()
    assert expert_scores(trace, "tcess").tolist() == [0.75 / 3, 0.5 / 3, 0.75 / 3, 0]
    assert expert_scores(trace, "counts").tolist() == [1 / 3, 1, 1 / 3, 1 / 3]
    assert hot_experts(trace, ["a"], 0.25).tasks["a"].experts.tolist() == [1]
    by_weight = hot_experts(trace, ["a"], 0.25, "tcess").tasks["a"]
    assert by_weight.experts.tolist() == [0]  # of equal scores the lower id
    assert by_weight.pattern.tolist() == expert_scores(trace, "counts").tolist()
    assert hot_experts(trace, ["a"], 0.5, "tcess").tasks["a"].experts.tolist() == [0, 2]


def with_norms():
    """The same choices; the second token is changed most, and the third not at all."""
    norms = np.array([[[8, 1]], [[4, 2]], [[9, 9]]], np.float32)
    changes = np.array([[0.5], [1], [0]], np.float32)
    return dataclasses.replace(weighted(), output_norms=norms, token_changes=changes)


def test_easy_ep_is_gate_weight_times_norm_times_change():
    trace = with_norms()
    terms = [3 * 1 * 0.5, 1 * 8 * 0.5 + 0.25 * 4 * 1, 0.75 * 2 * 1, 0]  # of experts 0 to 3
    assert expert_scores(trace, "easy-ep").tolist() == [each / 3 for each in terms]
    hot = hot_experts(trace, ["a"], 0.25, "easy-ep").tasks["a"]
    assert hot.experts.tolist() == [1]
    assert hot.pattern.tolist() == expert_scores(trace, "counts").tolist()


@pytest.mark.parametrize("score", ["tcess", "easy-ep"])
def test_scores_are_counted_in_blocks(monkeypatch, score):
    expected = expert_scores(with_norms(), score)
    monkeypatch.setattr(pinned, "BLOCK", 2)
    assert expert_scores(with_norms(), score).tolist() == expected.tolist()


@pytest.mark.parametrize("tasks", [["a"], ["a", "b"]])
@pytest.mark.parametrize("name", ["lru", "next-use", "moe-infinity"])
@pytest.mark.parametrize("capacity", [5, 9, 14])
def test_a_replay_with_pins_equals_the_cache(tasks, name, capacity):
    """The same steps served one by one, with changes of the pinned set in between."""
    trace = labelled(capacity)
    requests, pins = stream(trace, "runtime"), hot_experts(labelled(capacity), tasks, 0.2)
    changes = dict(pinned_by_step(trace, requests, pins))
    done = replay(
        requests, trace.offsets, capacity, policy(name), detail=True, pinned=[*changes.items()]
    )
    cache = Cache(Pieces.unsplit(trace.offsets.tolist(), [1, 1]), capacity, policy(name))
    for s in range(requests.layer.size):
        if s in changes:
            cache.pin(changes[s])
        part = slice(int(requests.starts[s]), int(requests.starts[s + 1]))
        requested = requests.pieces[part].astype(np.int64)
        served = cache.serve(
            requested, int(requests.now[s]), token=int(requests.token[s]),
            request=int(requests.request[s]), prefill=bool(requests.prefill[s]),
            rows=requests.rows[part], weights=requests.weights[part],
        )  # fmt: skip
        if served.pinned:
            cache.release(requested)
        assert (served.hits == 0).tolist() == done.missed[part].tolist(), s


def test_pinned_experts_change_after_each_prompt():
    """After each prompt; the fourth request has none, and is three tokens long."""
    trace = labelled()
    requests = stream(trace, "runtime")
    hot = pinned_by_step(trace, requests, hot_experts(trace, ["a", "b"], 0.2))
    layers = trace.layers
    assert [step for step, _ in hot] == [layers, 5 * layers, 8 * layers, 12 * layers]
    assert [s for s, _ in pinned_by_step(trace, requests, hot_experts(trace, ["b"], 0.2))] == [0]


def test_impossible_pins_are_errors():
    trace = labelled()
    requests = stream(trace, "runtime")
    with pytest.raises(UnknownName, match="unknown task 'c': choose one of a, b"):
        hot_experts(trace, ["c"], 0.1)
    with pytest.raises(UsageError, match="is 1: it must be above 0 and below 1"):
        hot_experts(trace, ["a"], 1.0)
    with pytest.raises(UnknownName, match="unknown score 'norm': choose one of counts, tcess, "):
        hot_experts(trace, ["a"], 0.1, "norm")
    with pytest.raises(UsageError, match="tcess needs gate weights, which the trace does not have"):
        hot_experts(trace, ["a"], 0.1, "tcess")
    for missing in ({"output_norms": None}, {"token_changes": None}):
        with pytest.raises(UsageError, match="easy-ep needs norms of experts' outputs, which the"):
            expert_scores(dataclasses.replace(with_norms(), **missing), "easy-ep")
    stay = pinned_by_step(trace, requests, hot_experts(trace, ["a"], 0.5))
    with pytest.raises(BudgetError, match="the 8 experts of --pin leave no slot"):
        replay(requests, trace.offsets, 8, policy("lru"), pinned=stay)
    with pytest.raises(UsageError, match="--pin FILE and --reset exclude each other"):
        replay(requests, trace.offsets, 9, policy("lru"), pinned=stay, reset=True)
