"""The guard of speculation, with passes of given times."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.speculation.guard import SpeculationGuard


def run(guard: SpeculationGuard, passes: int, gain: float, noise: float = 0.1) -> tuple[int, int]:
    """Run passes that give `gain` times as many tokens a second with drafts; (with, without)."""
    random = np.random.default_rng(1)
    counts = [0, 0]
    for _ in range(passes):
        counts[not guard.on] += 1
        tokens = int(random.integers(1, 6)) if guard.on else 1
        seconds = (tokens / gain if guard.on else 1.0) * random.lognormal(0, noise)
        guard.passed(seconds, tokens, 1)
    return counts[0], counts[1]


@pytest.mark.parametrize("gain", [1.3, 2.0, 4.0])
def test_drafts_that_pay_stay_on(gain: float) -> None:
    guard = SpeculationGuard()
    _, without = run(guard, 500, gain)
    assert guard.on
    assert guard.trials >= 1
    assert guard.verdict is not None
    assert guard.verdict.startswith("speculation on: tokens took")
    assert without < 90  # one trial of at most 32 pairs, mostly far fewer


@pytest.mark.parametrize("gain", [0.5, 0.8])
def test_drafts_that_do_not_pay_are_switched_off(gain: float) -> None:
    guard = SpeculationGuard()
    drafted, _ = run(guard, 3000, gain)
    assert not guard.on
    assert guard.verdict is not None
    assert guard.verdict.startswith("speculation off")
    assert drafted < 200


def test_a_change_is_noticed_in_a_later_trial() -> None:
    guard = SpeculationGuard()
    run(guard, 1000, 2.0)
    assert guard.on
    run(guard, 3000, 0.5)
    assert not guard.on
    run(guard, 20_000, 2.0)
    assert guard.on


def test_passes_that_cannot_be_compared_are_left_out() -> None:
    guard = SpeculationGuard()
    for number in range(200):
        guard.passed(1.0, 3, 1 + number % 2)  # another number of sequences each time
        guard.passed(0.0, 1, 1 + number % 2)
        guard.passed(float("inf"), 1, 1 + number % 2)
    assert guard.trials == 0
    assert guard.on
    assert guard.verdict is None
