"""Runs scenarios under the scheduler: by seeds, or by a list of choices."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from tests.schedules.primitives import THREADS, replaced
from tests.schedules.scheduler import Failure, Scheduler, Strategy
from tests.schedules.strategies import Replay, strategy_of

MOST_SHRINKS = 300  # runs that look for a shorter list of choices
PATCHED = ("greenroom.", "tests.runtime.", "tests.hf.memory.sensor", "tests.server.rig")


@dataclass(frozen=True)
class Scenario:
    """What the threads of a schedule do.

    play:   runs in the first thread, and draws the workload from its random numbers
    traced: modules between whose lines threads may change
    polls:  functions whose timed waits may end without a wake-up
    length: number of steps of most schedules
    """

    name: str
    play: Callable[[Random], None]
    traced: tuple[str, ...]
    polls: tuple[str, ...] = ()
    length: int = 100

    def run(self, seed: int, strategy: Strategy | None = None) -> Scheduler:
        """Run one schedule of the workload of a seed; raise its Failure, if any."""
        files = {importlib.import_module(name).__file__ or "" for name in self.traced}
        scheduler = Scheduler(
            strategy or strategy_of(seed, self.length), frozenset(files), frozenset(self.polls)
        )
        scheduler.run(lambda: self.play(Random(f"{self.name} {seed}")))
        return scheduler

    def shrink(self, seed: int, choices: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Leave out choices that a failure does not need, as far as some hundred runs show."""
        needed, runs, size = list(choices), 0, 0
        size = max(1, len(needed) // 2)
        while size and runs < MOST_SHRINKS:
            at = 0
            while at < len(needed) and runs < MOST_SHRINKS:
                fewer, runs = needed[:at] + needed[at + size :], runs + 1
                try:
                    self.run(seed, Replay(fewer))
                except Failure:
                    needed = fewer
                else:
                    at += size
            size //= 2
        return tuple(needed)


@contextmanager
def patched() -> Iterator[None]:
    """Put the scheduler's primitives into Greenroom's modules, and be silent."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with replaced(PATCHED):
            yield
    finally:
        logging.disable(disabled)


def run_threads(*works: Callable[[], None]) -> None:
    """Run each function in a thread of the schedule, and wait for their ends."""
    threads = [THREADS.Thread(target=work, name=work.__name__) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
