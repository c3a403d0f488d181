"""The all-resident path: the cache evicts nothing, and its order of use is recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.all_resident import AllResident
from greenroom.core.cache.placement import Placement
from greenroom.core.counts import Counts
from greenroom.core.events import Computed, Landed, Resized, Routed, StartChunk
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy

LAYERS, EXPERTS = 2, 4
PIECES = Pieces.unsplit([0, 4, 8], [1, 1])


def filled(name: str = "lru", capacity: int = 8) -> Scheduler:
    """A scheduler that has served every piece once, in ascending order."""
    scheduler = Scheduler(PIECES, capacity, policy(name))
    for layer in range(LAYERS):
        serve(scheduler, 0, layer, np.arange(4 * layer, 4 * layer + 4))
    return scheduler


def serve(scheduler: Scheduler, step: int, layer: int, experts: np.ndarray) -> None:
    """A step to its end, every chunk landing at once."""
    actions = scheduler.on(Routed(step, layer, experts))
    while scheduler.step is not None:
        landings = [Landed(a.lane, a.piece) for a in actions if isinstance(a, StartChunk)]
        actions = [a for e in landings for a in scheduler.on(e)]
        if scheduler.step is not None and scheduler.step.expert_groups:
            actions += scheduler.on(Computed())


def bypass(scheduler: Scheduler, experts: np.ndarray) -> np.ndarray | None:
    """A step on the all-resident path; None where it has to be routed."""
    path = scheduler.resident_steps.path
    return None if path is None else path.step(experts)


def test_a_step_bypasses_the_scheduler_once_every_expert_has_its_slot() -> None:
    scheduler = Scheduler(PIECES, 8, policy("lru"))
    assert bypass(scheduler, np.array([0])) is None
    scheduler = filled()
    slots = bypass(scheduler, np.array([1, 3]))
    assert slots is not None
    assert slots.tolist() == [scheduler.placement.slot(expert) for expert in (1, 3)]
    assert (scheduler.counts.requests, scheduler.counts.hits, scheduler.counts.steps) == (10, 2, 3)


def test_an_expert_never_requested_delays_only_its_own_step() -> None:
    scheduler = Scheduler(PIECES, 8, policy("lru"))
    serve(scheduler, 0, 0, np.array([0, 2]))
    assert bypass(scheduler, np.array([0, 2])) is not None
    counts = replace(scheduler.counts)
    assert bypass(scheduler, np.array([0, 1])) is None
    assert scheduler.counts == counts
    serve(scheduler, 1, 0, np.array([0, 1]))
    assert bypass(scheduler, np.array([0, 1, 2])) is not None
    assert bypass(scheduler, np.array([5])) is None
    scheduler.on(Resized(2))
    assert scheduler.residents().tolist() == [1, 2]


@pytest.mark.parametrize(("name", "capacity"), [("lru", 7), ("lfu", 8), ("next-use", 8)])
def test_no_all_resident_path_with_few_slots_or_other_policies(name: str, capacity: int) -> None:
    scheduler = filled(name, capacity)
    assert bypass(scheduler, np.array([4])) is None


steps = st.lists(
    st.tuples(st.integers(0, 1), st.sets(st.integers(0, 3), min_size=1), st.booleans()),
    max_size=12,
)


@settings(deadline=None)
@given(steps, st.integers(1, 7))
def test_after_a_resize_the_residents_equal_those_of_a_scheduler_path(
    requests: list[tuple[int, set[int], bool]], capacity: int
) -> None:
    """Steps on the all-resident path and on the scheduler's, in any mixture."""
    ours, scheduled = filled(), filled()
    for step, (layer, experts, bypasses) in enumerate(requests, 1):
        pieces = np.array(sorted(experts)) + 4 * layer
        serve(scheduled, step, layer, pieces)
        if not bypasses:
            serve(ours, step, layer, pieces)
        else:
            assert bypass(ours, pieces) is not None
    for scheduler in (ours, scheduled):
        scheduler.on(Resized(capacity))
    assert ours.residents().tolist() == scheduled.residents().tolist()
    assert ours.counts == scheduled.counts
    assert bypass(ours, ours.residents()[:1]) is None


def test_a_report_without_uses_leaves_the_policy_s_order() -> None:
    placement = Placement(PIECES, 8, policy("lru"), "shared", 0, 0)
    cache = placement.cache
    cache.serve(np.arange(4), 0, "none")
    cache.serve(np.arange(4, 8), 1, "none")
    path = AllResident.of(placement, Counts())
    assert path is not None
    path.report()
    path.step(np.array([0]))
    path.report()
    cache.resize(2)
    assert cache.residents().tolist() == [0, 7]
