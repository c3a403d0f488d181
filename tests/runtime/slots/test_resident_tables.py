"""Compiled steps on the all-resident path leave what steps by themselves leave."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.events import Resized
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from greenroom.runtime.slots.resident_tables import ResidentTables, SlotTables
from tests.core.cache.test_all_resident import PIECES, filled, serve, steps


def place(tables: SlotTables, pieces: list[int]) -> int:
    """Update a step's tables for these pieces as compiled code does (native/router.cpp)."""

    def entry(start: int, piece: int) -> Any:
        return ctypes.c_int64.from_address(start + 8 * (tables.first + piece))

    if any(entry(tables.slot_of, piece).value < 0 for piece in pieces):
        return 0
    for piece in pieces:
        entry(tables.last_used, piece).value = tables.step
        entry(tables.requests, piece).value += 1
    return len(pieces)


@settings(deadline=None)
@given(steps, st.integers(1, 7))
def test_steps_in_one_call_leave_the_same_state_as_single_steps(
    steps: list[tuple[int, set[int], bool]], capacity: int
) -> None:
    """Of tokens that pass through both layers; the second step may have to be done alone."""
    ours, scheduled = filled(), filled()
    counted = np.zeros(8, np.int64)
    tables = ResidentTables(ours, counted)
    for step, (missing, experts, _) in enumerate(steps, 1):
        chosen = [sorted(experts), sorted(3 - e for e in experts)]

        def find(tables: Any, chosen: Any = chosen, done: int = 1 + missing) -> list[int]:
            each = [tables._replace(first=4 * n, step=tables.step + n) for n in range(done)]
            return [place(*pair) for pair in zip(each, chosen, strict=False)]

        assert tables.steps(0, find) == 1 + missing
        if not missing:
            assert tables.steps(1, lambda tables, pieces=chosen[1]: [place(tables, pieces)]) == 1  # type: ignore[misc]
        for layer, pieces in enumerate(chosen):
            serve(scheduled, step, layer, np.array(pieces) + 4 * layer)
    for scheduler in (ours, scheduled):
        scheduler.on(Resized(capacity))
    assert ours.residents().tolist() == scheduled.residents().tolist()
    assert ours.counts == scheduled.counts
    assert counted.sum() == sum(2 * len(experts) for _, experts, _ in steps)


def test_no_steps_are_served_if_the_scheduler_has_to_decide() -> None:
    tables = ResidentTables(Scheduler(PIECES, 7, policy("lru")), np.zeros(8, np.int64))
    assert tables.steps(0, lambda tables: 1 / 0) is None  # type: ignore[arg-type,return-value]
    full = filled()
    before, tables = replace(full.counts), ResidentTables(full, np.zeros(8, np.int64))
    assert tables.steps(0, lambda tables: []) == 0
    assert full.counts == before
