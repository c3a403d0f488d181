"""Strategies that choose the next thread: random walks, priorities, and lists of choices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from random import Random

from tests.schedules.scheduler import Strategy, Task

LINES = (1 << 60, 1000, 200, 30, 6)  # mean steps between two points between lines


class Replay:
    """The choices of a list, {step: index}; else the thread goes on that has run."""

    def __init__(self, choices: Iterable[tuple[int, int]]) -> None:
        self._choices = dict(choices)
        self._steps = sorted(self._choices)
        self.next_line = self._after(0)

    def _after(self, step: int) -> int:
        at = bisect_left(self._steps, step)
        return self._steps[at] if at < len(self._steps) else 1 << 62

    def choose(self, step: int, tasks: list[Task], stays: bool, sleeper: Task | None) -> int:
        self.next_line = self._after(step + 1)
        return self._choices.get(step, 0) % len(tasks)


class Walk:
    """A random walk: at each point another thread with a fixed chance."""

    def __init__(self, random: Random) -> None:
        self._random, self._chance = random, random.choice((0.05, 0.3, 0.9))
        self._early = random.choice((0.0, 0.1, 0.5))  # a timed wait ends, other than by necessity
        self._gap = random.choice(LINES)
        self.next_line = self._draw_gap()

    def _draw_gap(self) -> int:
        return int(self._random.expovariate(1 / self._gap))

    def choose(self, step: int, tasks: list[Task], stays: bool, sleeper: Task | None) -> int:
        random = self._random
        is_line = step >= self.next_line
        if is_line:
            self.next_line = step + self._draw_gap()
        if stays and not is_line and random.random() >= self._chance:
            return 0
        count = len(tasks) - (sleeper is not None)
        if sleeper is not None and random.random() < self._early:
            return count
        return random.randrange(count)


class Priorities:
    """Random priorities that change at a few steps (PCT).

    Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs
    (ASPLOS 2010): with d changes, a bug of depth d + 1 is found with a known probability. The
    changes are in the first `length` steps.
    """

    def __init__(self, random: Random, length: int) -> None:
        self._random = random
        changes = random.choice((1, 2, 3, 5, 20))
        self._steps = sorted(random.randrange(length) for _ in range(changes))
        self._priorities: dict[int, float] = {}
        self._changes = 0

    @property
    def next_line(self) -> int:
        return self._steps[self._changes] if self._changes < len(self._steps) else 1 << 62

    def choose(self, step: int, tasks: list[Task], stays: bool, sleeper: Task | None) -> int:
        count = len(tasks) - (sleeper is not None)
        for task in tasks:
            self._priorities.setdefault(task.number, 1.0 + self._random.random())
        if step >= self.next_line:
            self._changes += 1
            self._priorities[tasks[0].number] = -float(self._changes)
            if sleeper is not None and self._random.random() < 0.2:
                return count
        return max(range(count), key=lambda i: self._priorities[tasks[i].number])


def strategy_of(seed: int, length: int) -> Strategy:
    """Return the strategy of a seed: half of them are random walks, half have priorities."""
    random = Random(f"strategy {seed}")
    return Walk(random) if random.random() < 0.5 else Priorities(random, length)
