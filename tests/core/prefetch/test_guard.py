"""The guard against simulated machines on which prefetching helps, harms, or does neither."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.prefetch import guard as g
from greenroom.core.prefetch.guard import Guard, Trial, TrialResult

Ratio = Callable[[int], float] | float


class Machine:
    """Passes of about one second without prefetching, `ratio` times that with it."""

    def __init__(
        self, ratio: Ratio, noise: float = 0.1, seed: int = 0, switch: float = 0.0, stall: float = 0
    ) -> None:
        self.guard, self.stall = Guard(seed), stall
        self._ratio, self._noise, self._switch = ratio, noise, switch
        self._random = np.random.default_rng([seed, 1])
        self.seconds = self.plain = self.best = 0.0
        self.sides: list[bool] = []
        self.tested: list[bool] = []
        self.verdicts: list[tuple[int, str]] = []
        self.guard.passed(1.0, 0.0, tokens=512)  # a prompt, and the token after it
        self.guard.passed(1.0, 0.0)

    def run(self, passes: int) -> Machine:
        for _ in range(passes):
            guard, n = self.guard, len(self.sides)
            ratio = self._ratio if isinstance(self._ratio, float) else self._ratio(n)
            plain = float(np.exp(self._noise * self._random.standard_normal()))
            seconds = plain * (ratio if guard.on else 1.0)
            seconds += self._switch if self.sides and guard.on != self.sides[-1] else 0.0
            self.seconds += seconds
            self.plain += plain
            self.best += plain * min(ratio, 1.0)
            self.sides.append(guard.on)
            self.tested.append(guard._trial is not None)
            guard.passed(seconds, self.stall * seconds)
            if guard.verdict and (not self.verdicts or self.verdicts[-1][1] != guard.verdict):
                self.verdicts.append((n + 1, guard.verdict))
        return self


def trials(machine: Machine) -> list[tuple[int, int]]:
    """(first pass, pass after the last) of each trial."""
    edges = np.flatnonzero(np.diff([0, *map(int, machine.tested), 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


SEEDS = range(60)


@pytest.mark.parametrize(("ratio", "on", "passes"), [(0.8, True, 140), (1.1, False, 270)])
def test_a_real_difference_is_found_in_time(ratio, on, passes):
    ended = [Machine(ratio, seed=seed).run(passes) for seed in SEEDS]
    right = [m.guard.on == on and m.guard._trial is None and len(m.verdicts) == 1 for m in ended]
    assert np.mean(right) >= 0.96
    word = "prefetching on: tokens took" if on else "prefetching off: tokens took"
    assert all(m.guard.verdict.startswith(word) for m, ok in zip(ended, right, strict=True) if ok)


def test_trials_cost_little_if_prefetching_changes_nothing():
    """Switching is not free here: the next pass takes a quarter longer."""
    costs = [m.seconds / m.plain - 1 for m in (Machine(1.0, 0.1, s, 0.25).run(2500) for s in SEEDS)]
    assert 0 < min(costs) <= max(costs) < 0.01


@pytest.mark.parametrize("ratio", [1.02, 1.1, 1.5, 0.9, 0.6])
def test_the_guard_is_close_to_the_better_side_from_the_first_pass(ratio):
    costs = [m.seconds / m.best for m in (Machine(ratio, seed=s).run(4000) for s in SEEDS[:20])]
    assert np.mean(costs) < 1.015


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20),
    slow=st.floats(0.01, 100.0),
    changes=st.integers(1, 400),
    tokens=st.lists(st.sampled_from([1, 1, 1, 1, 4, 512]), min_size=1, max_size=5),
)
def test_the_share_of_passes_in_trials_is_bounded_whatever_happens(times, slow, changes, tokens):
    """Changes of the situation without end, prompts in between, times out of any order."""
    guard, counted, tested, before = Guard(), 0, 0, None
    for i in range(3000):
        n = tokens[i // 50 % len(tokens)]
        counts = n == before and n <= g.MOST_TOKENS
        before = n
        counted += counts
        tested += counts and (guard._trial is not None)
        seconds = times[i % len(times)] * (slow if guard.on else 1.0)
        guard.passed(seconds, seconds * (i // 100 % 2), n)
        if i % changes == 0:
            guard.changed()
        assert tested <= g.FIRST + g.SHARE * counted


@settings(max_examples=80, deadline=None)
@given(ratio=st.floats(1.02, 200.0), with_it=st.booleans())
def test_a_trial_of_steady_times_loses_no_more_than_its_bound(ratio, with_it):
    machine = Machine(ratio if with_it else 1 / ratio, noise=0.0).run(g.WARM_UP + 300)
    (begin, end), *_ = trials(machine)
    slow = machine.sides[begin:end].count(with_it)
    assert slow * (ratio - 1) <= max(20, 8 * (ratio - 1)) + 1e-6
    assert machine.guard.on != with_it


def test_two_hiccups_seldom_decide():
    """Passes in which the machine was doing something else, on a machine where prefetching pays."""
    draws, right = np.random.default_rng(0), 0
    for seed in range(100):
        hiccups, factor = draws.integers(0, 151, 2).tolist(), 10 ** draws.uniform(0.3, 6)
        trial, random = Trial(True, np.random.default_rng(seed)), np.random.default_rng(seed)
        decision = None
        for i in range(2 * g.BLOCK * g.LOOKS[-1]):
            seconds = (0.75 if trial.on else 1.0) * float(np.exp(0.05 * random.standard_normal()))
            decision = trial.passed(seconds * (factor if i in hiccups else 1.0))
            if decision is not None:
                break
        assert decision is not None
        assert decision.ratio < 1 or not decision.decided
        right += decision.decided
    assert right >= 97


@pytest.mark.parametrize("drift", [0.01, -0.01, 0.0005])
def test_a_drift_weighs_on_both_sides_alike(drift):
    trial, decision, i = Trial(True, np.random.default_rng(0)), None, 0
    while decision is None:
        decision = trial.passed(float(np.exp(drift * i)))
        i += 1
    assert not decision.decided
    assert decision.ratio == pytest.approx(1, abs=2e-3)


def test_no_side_is_measured_right_after_a_switch():
    trial = Trial(False, np.random.default_rng(0))
    sides, decision = [], None
    while decision is None:
        settling = not sides or sides[-1] != trial.on
        sides.append(trial.on)
        decision = trial.passed(1.5 if settling and len(sides) > 1 else 1.0)
    assert decision.ratio == 1.0
    blocks = "".join("01"[side] for side in sides)[:16]
    assert blocks == "0000111111110000"


def test_prompts_and_invalid_times_are_not_counted():
    guard = Guard()
    for _ in range(40):
        guard.passed(50.0, 49.0, tokens=512)
        guard.passed(9.0, 8.0, tokens=1)  # the first after a prompt
        for seconds in (0.0, -1.0, float("nan"), float("inf")):
            guard.passed(seconds, 0.0)
    for _ in range(g.WARM_UP):
        assert guard._trial is None
        guard.passed(1.0, 0.0)
    assert guard._trial is not None


@pytest.mark.parametrize("ratio", [0.7, 1.3])
def test_a_guard_that_starts_off_measures_before_it_is_on(ratio):
    machine = Machine(ratio)
    machine.guard.start_off()
    machine.run(g.WARM_UP + 300)
    first = g.WARM_UP + g.BLOCK  # the trial begins with the side that is used so far
    assert machine.sides[: first + 1] == [False] * first + [True]
    assert machine.guard.on == (ratio < 1)
    assert machine.guard.trials == 1


def test_batches_of_a_size_are_decode():
    guard = Guard()
    for _ in range(g.WARM_UP + 300):
        guard.passed(1.3 if guard.on else 1.0, 0.0, tokens=8)
    assert not guard.on


def test_trials_come_at_growing_intervals():
    decision = trials(Machine(1.3, noise=0.0).run(12_000))
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(decision)]
    assert decision[0][0] == g.WARM_UP
    assert gaps == [512, 1024, 2048, 4096][: len(gaps)]
    assert len(gaps) >= 4


def test_a_change_starts_a_trial_at_once_and_resets_the_interval():
    machine = Machine(1.3, noise=0.0).run(3000)
    before = trials(machine)
    machine.guard.changed()
    machine.run(1)
    assert not machine.guard.on or (machine.guard._trial is not None)
    machine.run(1200)
    after = trials(machine)[len(before) :]
    assert after[0][0] <= 3001
    assert after[1][0] - after[0][1] == 1024  # the same was found: 512 doubled


def test_a_shift_of_stalls_starts_a_trial():
    machine = Machine(1.3, noise=0.0, stall=0.05).run(700)
    count = len(trials(machine))
    machine.stall = 0.1
    assert len(trials(machine.run(200))) == count
    machine.stall = 0.5
    assert len(trials(machine.run(200))) == count + 1


def test_prefetching_is_switched_when_its_gain_changes_sign():
    machine = Machine(lambda n: 0.7 if n < 2000 else 1.2 if n < 8000 else 0.7).run(25_000)
    assert [v.split(":")[0] for _, v in machine.verdicts] == [
        "prefetching on", "prefetching off", "prefetching on",
    ]  # fmt: skip
    (_, _), (off, _), (on, _) = machine.verdicts
    assert 2000 < off < 8000 < on


def test_prefetching_without_effect_is_not_switched():
    """Hysteresis: once prefetching was found to pay, a tie does not switch it off."""
    shares = [Machine(lambda n: 0.7 if n < 500 else 1.0, seed=s).run(6000) for s in range(20)]
    assert np.mean([m.guard._incumbent for m in shares]) >= 0.8
    assert min(len(trials(m)) for m in shares) >= 3


def test_the_verdict_is_one_line_and_changes_once():
    machine = Machine(1.4, noise=0.02).run(5000)
    ((_, verdict),) = machine.verdicts
    assert len(trials(machine)) > 2
    assert re.fullmatch(
        r"prefetching off: tokens took (39|40|41) % longer with it"
        r" \(1\.[34]\d to 1\.4\d times, \d+ pairs\)",
        verdict,
    )
    faster = Machine(0.8, noise=0.02).run(300).guard.verdict
    assert re.match(r"prefetching on: tokens took (19|20|21) % less time with it \(0\.", faster)
    same = TrialResult([0.0] * 32, np.random.default_rng(0), clear=False).verdict(on=False)
    assert same == "prefetching off: tokens took as long with it (1.00 to 1.00 times, 32 pairs)"


def test_equal_times_give_equal_decisions():
    one, two = (Machine(1.01, seed=3).run(1500) for _ in range(2))
    assert one.sides == two.sides
    assert one.verdicts == two.verdicts


def test_chance_alone_seldom_decides():
    """Trials of equal sides rarely find a difference.

    Three looks at 1 % add up to three trials in a hundred, and few pairs make it some more."""
    wrong, n = 0, 400
    for seed in range(n):
        random, decision = np.random.default_rng([seed, 7]), None
        trial = Trial(True, np.random.default_rng(seed))
        while decision is None:
            decision = trial.passed(float(np.exp(0.1 * random.standard_normal())))
        wrong += decision.decided
    assert wrong <= 0.1 * n
