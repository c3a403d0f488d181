"""The scheduler finds the errors of small programs, and each seed repeats its schedule."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from tests.schedules.primitives import CLOCK, QUEUES, THREADS, point
from tests.schedules.runner import Scenario, run_threads
from tests.schedules.scheduler import Deadlock, Failure, Livelock, LostWakeup, Scheduler
from tests.schedules.strategies import Priorities, Replay, Walk, strategy_of

SEEDS = range(60)
CHOICES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), max_size=8)


def _failures(play: Callable[[], None], *, traced: bool = False, polls: tuple[str, ...] = ()):
    """Run a program by many seeds; return the failures."""
    scenario = Scenario("toy", lambda random: play(), (__name__,) * traced, polls)
    found = []
    for seed in SEEDS:
        try:
            scenario.run(seed)
        except Failure as failure:
            found.append(failure)
    return found


def _lost_update() -> None:
    """Two threads add to a number without a lock."""
    count = 0

    def add() -> None:
        nonlocal count
        now = count
        point()
        count = now + 1

    run_threads(add, add)
    assert count == 2


def _check_then_act() -> None:
    """Two threads take items, each after a look whether one is there."""
    items = [*range(7)]

    def take() -> None:
        for _ in range(7):
            if items:
                items.pop()

    run_threads(take, take)


def _crossed_locks() -> None:
    one, other = THREADS.Lock(), THREADS.RLock()

    def forwards() -> None:
        with one, other:
            pass

    def backwards() -> None:
        with other, one:
            pass

    run_threads(forwards, backwards)


def _condition(*, checks: bool, timeout: float | None = None) -> None:
    """One thread waits for a flag; without `checks` it may miss the notification."""
    changed, flag = THREADS.Condition(), []

    def wait() -> None:
        with changed:
            while not flag if checks else True:
                changed.wait(timeout)
                if not checks:
                    break

    def notify() -> None:
        with changed:
            flag.append(1)
            changed.notify_all()

    run_threads(wait, notify)


def test_a_lost_update_is_found() -> None:
    assert any("assert 1 == 2" in str(each) for each in _failures(_lost_update))


def test_threads_change_between_lines_of_traced_files() -> None:
    assert not _failures(_check_then_act)
    assert any("IndexError" in str(each) for each in _failures(_check_then_act, traced=True))


def test_a_deadlock_is_found_with_the_stacks_of_its_threads() -> None:
    found = _failures(_crossed_locks)
    assert found
    assert all(isinstance(each, Deadlock) for each in found)
    assert "forwards" in str(found[0])
    assert "backwards" in str(found[0])


def test_a_missed_notification_is_found() -> None:
    assert not _failures(lambda: _condition(checks=True))
    found = _failures(lambda: _condition(checks=False))
    assert found
    assert all(isinstance(each, Deadlock) for each in found)


def test_a_wait_that_nobody_ends_is_a_lost_wakeup_unless_it_is_a_poll() -> None:
    found = _failures(lambda: _condition(checks=False, timeout=5.0))
    assert found
    assert all(isinstance(each, LostWakeup) for each in found)
    name = "_condition.<locals>.wait"
    assert not _failures(lambda: _condition(checks=False, timeout=5.0), polls=(name,))
    assert _failures(lambda: _condition(checks=False, timeout=5000.0), polls=(name,))


def test_an_endless_loop_is_found() -> None:
    def play() -> None:
        while True:
            point()

    with pytest.raises(Livelock):
        Scheduler(Replay([]), most_steps=1000).run(play)


def test_sleeps_last_their_time_and_the_clock_stands_still_meanwhile() -> None:
    order = []

    def play() -> None:
        def sleep(seconds: float) -> None:
            CLOCK.sleep(seconds)
            order.append((seconds, round(CLOCK.monotonic())))

        run_threads(*(lambda s=s: sleep(s) for s in (30.0, 10.0, 20.0)))

    Scheduler(Replay([])).run(play)
    assert order == [(10.0, 11), (20.0, 21), (30.0, 31)]


def test_primitives_do_what_python_s_do() -> None:
    def play() -> None:
        jobs, done, places = QUEUES.Queue(), THREADS.Event(), THREADS.Semaphore(1)
        seen: list[int] = []

        def work() -> None:
            while (job := jobs.get()) is not None:
                with places:
                    seen.append(job)
                jobs.task_done()
            done.set()

        thread = THREADS.Thread(target=work, name="worker")
        thread.start()
        for number in range(3):
            jobs.put(number)
        jobs.join()
        assert seen == [0, 1, 2]
        jobs.put(None)
        assert done.wait(1e6)
        thread.join()
        assert not thread.is_alive()
        with pytest.raises(QUEUES.Empty):
            jobs.get(timeout=0.5)
        lock = THREADS.Lock()
        assert lock.acquire(blocking=False)
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(timeout=1.0)

    for seed in SEEDS:
        Scheduler(strategy_of(seed, 100), polls=frozenset({f"{play.__qualname__}"})).run(play)


@pytest.mark.parametrize(
    "kind", [lambda seed: Walk(Random(seed)), lambda seed: Priorities(Random(seed), 60)]
)
def test_a_seed_repeats_its_schedule_and_so_does_its_list_of_choices(kind) -> None:
    scenario = Scenario("toy", lambda random: _condition(checks=True), (__name__,))
    for seed in SEEDS:
        first, again = (scenario.run(seed, kind(seed)) for _ in range(2))
        assert first.choices == again.choices
        replayed = scenario.run(seed, Replay(first.choices))
        assert (replayed.choices, replayed.step) == (first.choices, first.step)


def test_a_failing_schedule_is_shortened() -> None:
    scenario = Scenario("toy", lambda random: _lost_update(), (__name__,))
    seed = next(seed for seed in SEEDS if _fails(scenario, seed))
    with pytest.raises(Failure) as failure:
        scenario.run(seed)
    shorter = scenario.shrink(seed, failure.value.choices)
    assert 1 <= len(shorter) <= 3
    with pytest.raises(Failure):
        scenario.run(seed, Replay(shorter))


def _fails(scenario: Scenario, seed: int) -> bool:
    try:
        scenario.run(seed)
    except Failure:
        return True
    return False


def test_hypothesis_finds_the_shortest_failing_schedule() -> None:
    def fails(choices: list[tuple[int, int]]) -> bool:
        try:
            Scheduler(Replay(choices)).run(_lost_update)
        except Failure:
            return True
        return False

    # Other random numbers end at a schedule of two choices now and then.
    search = settings(max_examples=500, database=None, deadline=None, derandomize=True)
    shortest = find(CHOICES, fails, settings=search)
    assert len(shortest) == 1
    with pytest.raises(NoSuchExample):
        find(
            CHOICES,
            lambda choices: bool(Scheduler(Replay(choices)).run(lambda: _condition(checks=True))),
            settings=settings(max_examples=100, database=None, deadline=None),
        )


@given(CHOICES)
@settings(max_examples=60, deadline=None)
def test_no_schedule_of_a_right_program_fails(choices: list[tuple[int, int]]) -> None:
    Scheduler(Replay(choices)).run(lambda: _condition(checks=True))
