"""Cost of a step in calls of Python and C functions: a count, since time is noisy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from greenroom.core.events import Action, Computed, ComputeGroup, Event, Landed, Routed, StartChunk
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy

EXPERTS, TOP_K, CAPACITY = 64, 8, 100
ALL_HIT = {0: 24, 8: 38}  # calls at most, by the slots that may be borrowed
ONE_MISS, NEXT_MISS = 100, 30


def calls_of(work: Callable[[], list[Action]]) -> tuple[int, list[Action]]:
    """How many functions `work` calls, itself and the end of profiling left out."""
    count = 0

    def note(frame: FrameType, event: str, function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        actions = work()
    finally:
        sys.setprofile(None)
    return count - 2, actions


def step(scheduler: Scheduler, number: int, experts: list[int]) -> int:
    """Serve a step, every chunk landing by itself; how many functions the scheduler called."""
    total, waiting = 0, []
    event: Event | None = Routed(number, experts[0] // EXPERTS, np.array(experts, np.int64))
    while event is not None:
        calls, actions = calls_of(lambda event=event: scheduler.on(event, 0.0))  # type: ignore[misc]
        total, event = total + calls, None
        waiting += [a for a in actions if isinstance(a, StartChunk | ComputeGroup)]
        if waiting:
            match waiting.pop(0):
                case StartChunk() as chunk:
                    event = Landed(chunk.lane, chunk.piece, chunk.link)
                case ComputeGroup() as group:
                    event = Computed(group.device)
    assert scheduler.step is None
    return total


def served(name: str, ahead: int) -> list[int]:
    """Calls of steps with 0, 1, 2 ... 5 misses."""
    scheduler = Scheduler(
        Pieces.unsplit([0, EXPERTS, 2 * EXPERTS], [1, 1]), CAPACITY, policy(name), lanes=8,
        ahead=ahead,
    )  # fmt: skip
    random = np.random.default_rng(1)
    for number in range(40):  # compiles, and fills the cache
        chosen = random.choice(EXPERTS, TOP_K, replace=False) + EXPERTS * (number % 2)
        step(scheduler, number, sorted(chosen.tolist()))
    seen_calls = []
    for misses in range(6):
        resident = [e for e in scheduler.residents().tolist() if e < EXPERTS]
        absent = sorted({*range(EXPERTS)}.difference(resident))
        step(scheduler, 100 + misses, [EXPERTS + n for n in range(TOP_K)])
        resident = [e for e in scheduler.residents().tolist() if e in resident]
        experts = sorted(resident[: TOP_K - misses] + absent[:misses])
        before = scheduler.counts.misses
        seen_calls.append(step(scheduler, 200 + misses, experts))
        assert scheduler.counts.misses - before == misses
    return seen_calls


@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("name", ["lru", "llru", "next-use"])
def test_a_step_calls_few_functions(name: str, ahead: int) -> None:
    seen_calls = served(name, ahead)
    assert seen_calls[0] <= ALL_HIT[ahead]
    assert seen_calls[1] <= ONE_MISS
    further = np.diff(seen_calls[1:])
    assert further.max() <= NEXT_MISS, seen_calls
