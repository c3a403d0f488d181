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
    recorded = trace()
    steps = stream(recorded, "runtime")
    missed, _ = replay_steps(steps, recorded.offsets, 24, policy(name))
    replayed = replay(steps, recorded.offsets, 24, policy(name), detail=True)
    np.testing.assert_array_equal(missed, replayed.missed)


def test_counts_are_misses_a_token_of_both():
    recorded = trace()
    chosen_plan, steps = quick_plan(recorded, 24), stream(recorded, "runtime")
    counted = {
        name: replay(steps, recorded.offsets, 24, policy(name)).misses / recorded.tokens
        for name in ("lru", "next-use")
    }
    assert chosen_plan.lru_misses == pytest.approx(counted["lru"])
    assert chosen_plan.misses == pytest.approx(min(counted.values()))
    expected_policy = DEFAULT.policy if counted["next-use"] < counted["lru"] else PLAIN.policy
    assert (chosen_plan.setting.policy, chosen_plan.setting.prefetch) == (
        expected_policy,
        DEFAULT.prefetch,
    )


def test_lru_wins_a_tie(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickly, "replay_steps", lambda *_: (np.ones(7, np.bool_), None))
    chosen_plan = quick_plan(trace(), 24)
    assert (chosen_plan.setting.policy, chosen_plan.setting.scope) == ("lru", "shared")
    assert chosen_plan.misses == chosen_plan.lru_misses == 7 / trace().tokens


def test_only_the_latest_requests_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    recorded = small.trace([[-4, 1, 1], [-4, 1, 1], [-4, 1, 1, 1]])
    monkeypatch.setattr(quickly, "STEPS", 6 * recorded.layers)
    calls = []

    def looked(steps, *_):
        calls.append(steps.request.max() + 1)
        return np.zeros(1, np.bool_), None

    monkeypatch.setattr(quickly, "replay_steps", looked)
    quick_plan(recorded, 8)
    assert calls == [2, 2]  # the last has four passes: that before makes it six
