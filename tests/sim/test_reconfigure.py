"""Slots divided among layers anew between requests: when, from what, and what it changes."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.activity import Activity
from greenroom.core.cache.scope import Scope
from greenroom.core.cost import FREE
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.trace import Trace, stream

ROUND = [0, 1, 2, 0]  # the experts of layer 0 in each request; layer 1 uses expert 0 alone


def trace(requests: int) -> Trace:
    """Two layers of four experts, top-1; every request has four tokens."""
    tokens = len(ROUND) * requests
    first = np.tile(np.array(ROUND, np.uint8), requests)
    return Trace(
        experts=np.stack([first, np.zeros(tokens, np.uint8)], 1)[..., None],
        experts_per_layer=np.array([4, 4]),
        request_starts=np.arange(0, tokens + 1, len(ROUND)),
        pass_starts=np.arange(tokens + 1),
        pass_prefill=np.zeros(tokens, np.bool_),
        labels=("",) * requests,
    )


def run(
    requests: int, tau: int, prefetch: str = "off", scopes: list[Scope] | None = None, **options
) -> tuple[EventRun, list]:
    """LRU with two slots a layer; when the slots are divided anew, layer 0 has three."""
    seen = []

    def divide(activity: Activity, scope: Scope) -> tuple[float, ...]:
        if scopes is not None:
            scopes.append(scope)
        right = [float(activity.accuracy(layer).sum()) for layer in range(2)]
        seen.append((activity.tokens.tolist(), activity.activated.tolist(), right))
        return 3.0, 1.0

    recorded = trace(requests)
    result = simulate_events(
        recorded, stream(recorded, "runtime"), 4, policy("lru"), FREE, 10, prefetch,
        EventOptions(scope="per-layer", tau=tau, divide=divide, **options),
    )  # fmt: skip
    return result, seen


def test_slots_are_divided_between_requests_once_tau_tokens_were_decoded():
    """Layer 0 with two slots misses all of 0 1 2 0; with three, what it holds is 0, 2, then 1."""
    for tau in (0, 9):  # never, and not before the end
        result, seen = run(2, tau)
        assert (result.times.misses, seen) == (4 + 3 + 1, [])
    result, seen = run(2, 4)  # request 0: 4 + 1 misses; then 0 and 2 stay, and 1 is missed
    assert (result.times.misses, seen) == (4 + 1 + 1, [([4, 4], [4, 4], [0.0, 0.0])])
    result, seen = run(4, 8)
    assert [tokens for tokens, *_ in seen] == [[8, 8]]
    assert result.times.misses == 4 + 3 + 1 + 1
    assert [tokens for tokens, *_ in run(4, 4)[1]] == [[4, 4], [8, 8], [12, 12]]


def test_a_division_is_given_the_one_before():
    scopes: list[Scope] = []
    run(4, 4, scopes=scopes)
    assert scopes == ["per-layer", (3.0, 1.0), (3.0, 1.0)]


def test_an_emptied_cache_keeps_the_last_division():
    """Every request begins empty: 4 misses of layer 0 with two slots, 3 with three."""
    assert run(3, 0, reset=True)[0].times.misses == 3 * (4 + 1)
    assert run(3, 8, reset=True)[0].times.misses == 2 * (4 + 1) + 3 + 1
    assert run(3, 4, reset=True)[0].times.misses == 4 + 1 + 2 * (3 + 1)


def test_predictions_are_counted_with_the_tokens_that_they_were_made_for():
    """An oracle is right about each token, the first layer of the first one excepted or not."""
    _, ((tokens, activated, right),) = run(2, 4, "oracle")
    assert (tokens, activated) == ([4, 4], [4, 4])
    assert right[1] == pytest.approx(1.0)
    assert right[0] >= 0.75
