"""Training of next-use: the network that a run computes is the trained one, and it gains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from greenroom.config import TrainPolicyConfig
from greenroom.core.cache.state import empty_state
from greenroom.core.compiling.compile_cache import jit
from greenroom.core.policy import CacheState, LogicalTime
from greenroom.core.stream import Stream
from greenroom.errors import TraceError
from greenroom.policies.helpers import next_use_network as net
from greenroom.policies.next_use import next_use, on_request, on_step
from greenroom.runtime.recording import policy_training
from greenroom.runtime.recording.policy_training import train_policy
from greenroom.trace import Trace, stream

EXPERTS, TOP_K = (16, 12, 16), 2
LAYERS = len(EXPERTS)
CONFIG = TrainPolicyConfig(epochs=8)


def recording(requests: int, seed: int, length: int = 40) -> Trace:
    """Requests that walk through one of 80 cycles of tokens, which decide the experts.

    Every cycle is new to a request, so only earlier requests teach what comes next.
    """
    world, random = np.random.default_rng(0), np.random.default_rng(seed)
    vocabulary = 200
    cycles = np.stack([world.permutation(vocabulary)[:20] for _ in range(80)])
    of_token = [
        np.stack([world.permutation(n)[:TOP_K] for _ in range(vocabulary)]) for n in EXPERTS
    ]
    tokens = np.concatenate([
        np.resize(np.roll(cycles[random.integers(80)], random.integers(20)), length)
        for _ in range(requests)
    ])  # fmt: skip
    experts = np.stack([table[tokens] for table in of_token], axis=1).astype(np.uint8)
    return Trace(
        experts=experts,
        experts_per_layer=np.array(EXPERTS),
        request_starts=np.arange(requests + 1) * length,
        pass_starts=np.arange(requests * length + 1),
        pass_prefill=np.zeros(requests * length, bool),
        labels=("",) * requests,
    )


def _corrected(cache: CacheState, state: Any, requests: Stream, values: Any) -> None:
    before = -1
    for s in range(requests.layer.size):
        a, b, layer = requests.starts[s], requests.starts[s + 1], requests.layer[s] + 0
        now = LogicalTime(requests.now[s], requests.token[s], requests.request[s] + 0, layer, 0, a)
        if requests.request[s] != before:
            before = requests.request[s] + 0
            on_request(cache, state, now)
        on_step(cache, state, requests.pieces[a:b], requests.rows[a:b], requests.weights[a:b], now)
        for i in range(state.begin[layer + 1] - state.begin[layer]):
            values[s, i] = state.corrected[layer, i]


def corrected(trace: Trace, arrays: dict[str, Any]) -> Any:
    """The corrected values at every step, as a run computes them, [S, E]."""
    layer = np.repeat(np.arange(LAYERS), EXPERTS)
    cache = empty_state(layer, [1])
    state = next_use.build_state(next_use.setup(layer, cache.group_of, (1,), LAYERS, 0, None))
    net.restore(state.network, arrays)
    requests = stream(trace)
    values = np.zeros((requests.layer.size, max(EXPERTS)))
    jit(_corrected, _nrt=False)(cache, state, requests, values)
    return values


def test_a_run_computes_what_was_trained() -> None:
    """Random weights, requests of more than one pass, layers of different sizes."""
    trace = recording(4, seed=1, length=15)
    requests = stream(trace)
    steps, _ = policy_training._observe(requests, trace.offsets, 0)
    network = policy_training._Network(LAYERS, max(EXPERTS), TOP_K, seed=3)
    with torch.no_grad():
        for weights in network.parameters():
            weights += 0.1 * torch.randn_like(weights)
    network.eval()
    chunks = policy_training._chunks(requests.request[::LAYERS])
    assert chunks == [(0, 15), (15, 30), (30, 45), (45, 60)]
    ((used, features, _, mask),) = policy_training._batches(steps, chunks, TOP_K)
    assert mask.all()
    with torch.inference_mode():
        half = 0.5 * network(used, features).double()
    expected = (0.5 + 0.5 * half / (1 + half**2).sqrt()).reshape(-1, max(EXPERTS)).numpy()
    found = corrected(trace, network.arrays())
    for layer, experts in enumerate(EXPERTS):
        mine = expected[layer::LAYERS, :experts]
        np.testing.assert_allclose(found[layer::LAYERS, :experts], mine, atol=2e-5)
    assert np.std(expected) > 0.05
    untrained = corrected(trace, {})
    assert np.abs(untrained - found).max() > 0.1


def test_targets_are_optimal_values() -> None:
    """One layer used by hand: experts 0, 1, 0."""
    requests = stream(
        Trace(
            experts=np.array([[[0]], [[1]], [[0]]], np.uint8),
            experts_per_layer=np.array([3]),
            request_starts=np.array([0, 3]),
            pass_starts=np.arange(4),
            pass_prefill=np.zeros(3, bool),
            labels=("",),
        )
    )
    used, targets = policy_training._used_and_targets(requests, np.array([0, 3]), 0, 0.5)
    assert used[:, 0].tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert targets[:, 0].tolist() == [[0.5, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_earlier_requests_improve_the_estimates_of_new_ones() -> None:
    trace, new = recording(100, seed=1, length=20), recording(20, seed=2, length=20)
    done: list[int] = []
    learned = train_policy(stream(trace), trace.offsets, CONFIG, done.append)
    assert done == list(range(1, 9))
    optimal = policy_training._used_and_targets(stream(new), new.offsets, 0, 0.85)[1]
    network = {
        name.removeprefix(net.PREFIX): array
        for name, array in learned.items()
        if name.startswith(net.PREFIX)
    }
    errors = [
        np.mean((corrected(new, arrays) - optimal.reshape(-1, max(EXPERTS))) ** 2)
        for arrays in (network, {})
    ]
    assert errors[0] < 0.95 * errors[1], errors
    again = train_policy(stream(trace), trace.offsets, CONFIG)
    assert all(np.array_equal(again[name], array) for name, array in learned.items())


def test_the_last_passes_of_a_long_trace_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recording(10, seed=1)
    row = LAYERS * max(EXPERTS) * (4 * net.FEATURES + 4)
    monkeypatch.setattr(policy_training, "MOST_BYTES", 100 * row)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(policy_training, "_fit", lambda n, steps, chunks, *_: seen.extend(chunks))
    learned = train_policy(stream(trace), trace.offsets, CONFIG)
    assert seen == [(0, 20), (20, 60), (60, 100)]
    assert learned["layer_steps"].tolist() == [400] * LAYERS  # the policy learned from all


def test_a_short_trace_is_refused() -> None:
    trace = recording(6, seed=1)
    with pytest.raises(TraceError, match="has 240 passes to train on: at least 256"):
        train_policy(stream(trace), trace.offsets, CONFIG)
