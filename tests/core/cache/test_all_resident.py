"""A cache that holds everything decides nothing, and forgets no order of use."""

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


def at_once(scheduler: Scheduler, experts: np.ndarray) -> np.ndarray | None:
    """A step on the all-resident path; None where it has to be routed."""
    path = scheduler.all_resident_path
    return None if path is None else path.step(experts)


def test_a_step_is_straight_once_every_piece_has_its_slot() -> None:
    scheduler = Scheduler(PIECES, 8, policy("lru"))
    assert at_once(scheduler, np.array([0])) is None
    scheduler = filled()
    slots = at_once(scheduler, np.array([1, 3]))
    assert slots is not None
    assert slots.tolist() == [scheduler.placement.slot(expert) for expert in (1, 3)]
    assert (scheduler.counts.requests, scheduler.counts.hits, scheduler.counts.steps) == (10, 2, 3)


def test_what_was_never_asked_for_keeps_nobody_waiting_but_itself() -> None:
    scheduler = Scheduler(PIECES, 8, policy("lru"))
    serve(scheduler, 0, 0, np.array([0, 2]))
    assert at_once(scheduler, np.array([0, 2])) is not None
    counts = replace(scheduler.counts)
    assert at_once(scheduler, np.array([0, 1])) is None
    assert scheduler.counts == counts
    serve(scheduler, 1, 0, np.array([0, 1]))
    assert at_once(scheduler, np.array([0, 1, 2])) is not None
    assert at_once(scheduler, np.array([5])) is None
    scheduler.on(Resized(2))
    assert scheduler.residents().tolist() == [1, 2]


@pytest.mark.parametrize(("name", "capacity"), [("lru", 7), ("lfu", 8), ("next-use", 8)])
def test_not_where_one_is_absent_or_the_policy_counts(name: str, capacity: int) -> None:
    scheduler = filled(name, capacity)
    assert at_once(scheduler, np.array([4])) is None


steps = st.lists(
    st.tuples(st.integers(0, 1), st.sets(st.integers(0, 3), min_size=1), st.booleans()),
    max_size=12,
)


@settings(deadline=None)
@given(steps, st.integers(1, 7))
def test_after_a_resize_the_residents_equal_those_of_a_scheduler_path(
    requests: list[tuple[int, set[int], bool]], capacity: int
) -> None:
    """Straight or not, in any mixture."""
    ours, scheduled = filled(), filled()
    for step, (layer, experts, straight) in enumerate(requests, 1):
        pieces = np.array(sorted(experts)) + 4 * layer
        serve(scheduled, step, layer, pieces)
        if not straight:
            serve(ours, step, layer, pieces)
        else:
            assert at_once(ours, pieces) is not None
    for scheduler in (ours, scheduled):
        scheduler.on(Resized(capacity))
    assert ours.residents().tolist() == scheduled.residents().tolist()
    assert ours.counts == scheduled.counts
    assert at_once(ours, ours.residents()[:1]) is None


def test_nothing_used_leaves_the_order_as_it_was() -> None:
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
