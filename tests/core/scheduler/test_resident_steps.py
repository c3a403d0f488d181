"""Steps without events, and steps whose residents were computed before: decisions are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.events import (
    Action,
    Computed,
    ComputeGroup,
    Finish,
    Idle,
    Landed,
    Resized,
    Routed,
    StartChunk,
)
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, carry_out, ids, pieces
from tests.core.strategies import steps

NAMES = ["lru", "lfu", "next-use"]


def routed(number: int, layer: int, experts: set[int], digit: int) -> Routed:
    chosen = ids(*sorted(OFFSETS[layer] + expert for expert in experts))
    return Routed(number, layer, chosen, request=number // 4, prefill=digit == 0)


def state(scheduler: Scheduler) -> tuple[object, ...]:
    cache = scheduler.placement.cache
    cache.pin_hits()
    return scheduler.counts, cache.state.slot_of.tolist(), cache.state.pinned.tolist()


def shown(action: Action) -> object:
    if isinstance(action, ComputeGroup):
        return action.experts.tolist(), action.slots.tolist(), action.device
    return action


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(steps(LAYERS, EXPERTS, 40), st.integers(2, 11))
def test_steps_without_events_are_served_as_by_events(name, requests, capacity):
    ours, plain = (Scheduler(pieces(), capacity, policy(name), lanes=1) for _ in range(2))
    for number, request in enumerate(requests):
        event = routed(number, *request)
        actions = [*map(shown, carry_out(plain, plain.on(event)))]
        if (slots := ours.resident_steps.serve(event)) is None:
            assert [*map(shown, carry_out(ours, ours.on(event)))] == actions
            assert any(isinstance(action, StartChunk) for action in actions)
        else:
            assert actions == [shown(ComputeGroup(event.experts, slots)), Finish()]
        assert state(ours) == state(plain)


def test_a_step_needs_events_while_there_is_more_to_decide():
    scheduler = Scheduler(pieces(), 11, policy("lfu"), lanes=1)
    event = Routed(1, 0, ids(1, 2))
    carry_out(scheduler, scheduler.on(replace(event, step=0)))
    counts = replace(scheduler.counts)
    assert scheduler.resident_steps.serve(Routed(1, 0, ids(1, 3))) is None
    assert scheduler.counts == counts
    scheduler.on(Idle(ids(4, 5)))  # a read begins
    assert scheduler.resident_steps.serve(event) is None
    carry_out(scheduler, scheduler.on(event))
    scheduler.on(Landed(0, 4))
    scheduler.on(Resized(9, ahead=4))  # prefetches may borrow slots from now on
    assert scheduler.resident_steps.serve(event) is None
    scheduler = Scheduler(pieces(devices=2), 11, policy("lfu"), lanes=1)
    carry_out(scheduler, scheduler.on(event))
    assert scheduler.resident_steps.serve(event) is None  # each device has its own group


def in_turn(scheduler: Scheduler, event: Routed, before: bool) -> list[Action]:
    """Run a step, what is in slots computed before it, or first; return all other actions."""
    has_slot, entries = scheduler.placement.has_slot, scheduler.transfers.entries
    in_slots = {e for e in event.experts.tolist() if has_slot(e) and e not in entries}
    if before or len(in_slots) == event.experts.size:
        computed = frozenset(in_slots)
        return carry_out(scheduler, scheduler.on(replace(event, computed=computed)))
    actions = scheduler.on(event)
    if any(isinstance(action, ComputeGroup) for action in actions):
        *actions, first = actions
        assert isinstance(first, ComputeGroup)
        assert in_slots.issuperset(first.experts.tolist())
        actions += scheduler.on(Computed())
    return carry_out(scheduler, actions)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(steps(LAYERS, EXPERTS, 40), st.integers(2, 11))
def test_residents_that_were_computed_before_are_not_ordered(name, requests, capacity):
    ours, plain = (Scheduler(pieces(), capacity, policy(name), lanes=2) for _ in range(2))
    for number, request in enumerate(requests):
        event = routed(number, *request)
        found = [[*map(shown, in_turn(s, event, s is ours))] for s in (ours, plain)]
        assert found[0] == found[1]
        assert state(ours) == state(plain)
