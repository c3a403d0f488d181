"""The quick plan: LRU only where it misses no more than the default, on the latest requests."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.plan import quick as quickly
from greenroom.plan.quick import quick_plan
from greenroom.plan.settings import DEFAULT, PLAIN
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.sim.timed import replay_steps
from greenroom.trace import stream
from tests.plan.models import trace
from tests.sim import small


@pytest.mark.parametrize("name", ["lru", "next-use"])
def test_step_by_step_misses_what_the_compiled_loop_does(name: str):
    own = trace()
    steps = stream(own, "runtime")
    missed, _ = replay_steps(steps, own.offsets, 24, policy(name))
    whole = replay(steps, own.offsets, 24, policy(name), detail=True)
    np.testing.assert_array_equal(missed, whole.missed)


def test_counts_are_misses_a_token_of_both():
    own = trace()
    found, steps = quick_plan(own, 24), stream(own, "runtime")
    counted = {
        name: replay(steps, own.offsets, 24, policy(name)).misses / own.tokens
        for name in ("lru", "next-use")
    }
    assert found.lru_misses == pytest.approx(counted["lru"])
    assert found.misses == pytest.approx(min(counted.values()))
    wanted = DEFAULT.policy if counted["next-use"] < counted["lru"] else PLAIN.policy
    assert (found.setting.policy, found.setting.prefetch) == (wanted, DEFAULT.prefetch)


def test_lru_wins_a_tie(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickly, "replay_steps", lambda *_: (np.ones(7, np.bool_), None))
    found = quick_plan(trace(), 24)
    assert (found.setting.policy, found.setting.scope) == ("lru", "shared")
    assert found.misses == found.lru_misses == 7 / trace().tokens


def test_only_the_latest_requests_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    own = small.trace([[-4, 1, 1], [-4, 1, 1], [-4, 1, 1, 1]])
    monkeypatch.setattr(quickly, "STEPS", 6 * own.layers)
    seen = []

    def looked(steps, *_):
        seen.append(steps.request.max() + 1)
        return np.zeros(1, np.bool_), None

    monkeypatch.setattr(quickly, "replay_steps", looked)
    quick_plan(own, 8)
    assert seen == [2, 2]  # the last has four passes: that before makes it six
