"""Steps without events, and steps whose residents were computed before: decisions are the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

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
    Pinned,
    Predicted,
    Resized,
    Routed,
    StartChunk,
)
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
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


def fetch(scheduler: Scheduler, actions: list[Action]) -> list[Action]:
    """Carry out prefetches, and those that begin when they have arrived; return them all."""
    waiting = list(actions)
    for chunk in waiting:
        assert isinstance(chunk, StartChunk)
        waiting += scheduler.on(Landed(chunk.lane, chunk.piece, chunk.link))
    return waiting


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(steps(LAYERS, EXPERTS, 40), st.integers(2, 11), st.sampled_from((0, 2)))
def test_steps_without_events_are_served_as_by_events(name, requests, capacity, ahead):
    ours, plain = (
        Scheduler(pieces(), capacity, policy(name), lanes=1, ahead=ahead) for _ in range(2)
    )
    for number, request in enumerate(requests):
        event = routed(number, *request)
        event.prefill &= not ahead  # prompts prefetch
        if ahead and request[2] == 9:  # one of the layer's experts is predicted
            guess = Predicted(event.layer, event.experts[:1])
            fetched = [fetch(s, s.on(guess, number)) for s in (ours, plain)]
            assert fetched[0] == fetched[1]
        actions = [*map(shown, carry_out(plain, plain.on(event, number)))]
        if (slots := ours.resident_steps.serve(event, number)) is None:
            assert [*map(shown, carry_out(ours, ours.on(event, number)))] == actions
            started = any(isinstance(action, StartChunk) for action in actions)
            assert started or ahead
        else:
            assert actions == [shown(ComputeGroup(event.experts, slots)), Finish()]
        assert state(ours) == state(plain)
        assert ours.view.accuracy.by_distance() == plain.view.accuracy.by_distance()


def test_a_step_needs_events_while_there_is_more_to_decide():
    scheduler = Scheduler(pieces(), 11, policy("lfu"), lanes=1)
    event = Routed(1, 0, ids(1, 2))
    carry_out(scheduler, scheduler.on(replace(event, step=0)))
    counts = replace(scheduler.counts)
    assert scheduler.resident_steps.serve(Routed(1, 0, ids(1, 3)), 0.0) is None
    assert scheduler.counts == counts
    scheduler.on(Idle(ids(4, 5)))  # a read begins
    assert scheduler.resident_steps.serve(event, 0.0) is None
    carry_out(scheduler, scheduler.on(event))
    scheduler.on(Landed(0, 4))
    scheduler.on(Resized(9, ahead=4))  # prefetches may borrow slots from now on
    assert scheduler.resident_steps.serve(replace(event, prefill=True), 0.0) is None
    scheduler.on(Predicted(1, ids(9)))  # a read begins
    assert scheduler.resident_steps.serve(event, 0.0) is None
    scheduler = Scheduler(pieces(devices=2), 11, policy("lfu"), lanes=1)
    carry_out(scheduler, scheduler.on(event))
    assert scheduler.resident_steps.serve(event, 0.0) is None  # each device has its own group


def test_experts_of_a_step_are_pinned_while_a_thread_computes_them():
    """All slots are in use, so a prediction gets none; after the step it does."""
    scheduler = Scheduler(pieces(), 4, policy("lru"), lanes=1, ahead=1)
    event = Routed(0, 0, ids(0, 1, 2, 3))
    carry_out(scheduler, scheduler.on(event))
    residents = scheduler.resident_steps
    for number in (1, 2):
        event = replace(event, step=number)
        assert residents.serve_pinned(event, 0.0) is not None
        assert scheduler.on(Predicted(1, ids(int(OFFSETS[1])))) == []
        if number == 2:  # an interrupt came before the end of the first one
            residents.unpin()
            residents.unpin()
    assert not scheduler.placement.cache.state.pinned.any()
    (chunk,) = scheduler.on(Predicted(1, ids(int(OFFSETS[1]))))
    assert isinstance(chunk, StartChunk)


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


def with_host(name: str, capacity: int, host: int, ahead: int = 0) -> Scheduler:
    tier = HostTier(pieces(), host, policy(name))
    return Scheduler(pieces(), capacity, policy(name), lanes=(1, 1), host=tier, ahead=ahead)


def check_loads(ours: Scheduler, plain: Scheduler, event: Routed, now: float) -> None:
    """Serve a step in two equal schedulers, in one without events where that is possible."""
    at_hand = [
        ours.placement.has_slot(expert) or ours.transfers.host.has(expert)  # type: ignore
        for expert in event.experts.tolist()
    ]
    possible = all(at_hand) and len(at_hand) <= ours.capacity and not event.prefill
    actions = carry_out(plain, plain.on(event, now))
    chunks = [action for action in actions if isinstance(action, StartChunk)]
    misses = ours.resident_steps.load(event, now)
    assert (misses is not None) == possible
    if misses is None:
        done = carry_out(ours, ours.on(event, now))
        assert [*map(shown, done)] == [*map(shown, actions)]
    else:
        expected = [(chunk.piece, chunk.slot, chunk.host_slot) for chunk in chunks]
        assert misses.on_host == ()
        assert [*map(tuple, misses.loads.numbers.T.tolist())] == expected
    assert state(ours) == state(plain)
    hosts = [s.transfers.host for s in (ours, plain)]
    assert hosts[0] is not None
    assert hosts[1] is not None
    assert hosts[0].caches[0].slots() == hosts[1].caches[0].slots()
    assert (hosts[0].requests, hosts[0].hits) == (hosts[1].requests, hosts[1].hits)
    assert not hosts[0].leases


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(steps(LAYERS, EXPERTS, 40), st.integers(2, 11), st.integers(1, 12), st.sampled_from((0, 4)))
def test_experts_in_host_memory_are_loaded_as_by_events(name, requests, capacity, host, ahead):
    ours, plain = (with_host(name, capacity, host, ahead) for _ in range(2))
    for number, request in enumerate(requests):
        event = routed(number, *request)
        event.prefill &= not ahead  # prompts prefetch
        if ahead and request[2] == 9:  # a prediction that moves nothing: all is in slots
            first, end = OFFSETS[request[0] : request[0] + 2]
            there = [e for e in ours.residents().tolist() if first <= e < end]
            certain = Predicted(request[0], ids(*there))
            assert ours.on(certain, number) == plain.on(certain, number) == []
        check_loads(ours, plain, event, number)
        assert ours.view.accuracy.by_distance() == plain.view.accuracy.by_distance()


def test_experts_in_host_memory_are_loaded_at_once():
    scheduler = with_host("lfu", 2, 12)
    for number, expert in enumerate((1, 2, 3)):
        carry_out(scheduler, scheduler.on(Routed(number, 0, ids(expert))))
    slots = {piece: scheduler.placement.slot(piece) for piece in scheduler.residents().tolist()}
    (kept,) = {1, 2} & slots.keys()
    (gone,) = {1, 2} - slots.keys()
    host = scheduler.transfers.host.caches[0].slots()
    misses = scheduler.resident_steps.load(Routed(3, 0, ids(*sorted((gone, 3)))), 0.0)
    assert misses is not None
    assert misses.loads.numbers.tolist() == [[gone], [slots[kept]], [host[gone]]]  # 3 stays
    assert misses.on_host == ()
    assert scheduler.placement.cache.state.pinned.max() == 0
    assert (scheduler.counts.requests, scheduler.counts.hits) == (5, 1)
    assert scheduler.step is None
    scheduler.resident_steps.undo(misses, Routed(3, 0, ids(gone, 3)))
    assert scheduler.residents().tolist() == [3]


@pytest.mark.parametrize(
    "refused",
    [
        "no host",
        "on disk",
        "prompt",
        "too many",
        "pinned",
        "preloaded",
        "busy",
        "no pins",
        "weighs",
    ],
)
def test_steps_that_need_events_are_not_loaded(refused):
    lru = chosen = policy("lru")
    if refused == "weighs":
        chosen = policy("hybrimoe")
    elif refused == "preloaded":
        chosen = replace(lru, preload=lambda setup: ids(0, 3))
    tier = None if refused == "no host" else HostTier(pieces(), 12, lru)
    pin = "none" if refused == "no pins" else "step"
    scheduler = Scheduler(pieces(), 2, chosen, lanes=(1, 1), host=tier, pin=pin)
    for number, expert in enumerate((1, 2, 3)):
        carry_out(scheduler, scheduler.on(Routed(number, 0, ids(expert))))
    event = Routed(3, 0, ids(1, 2))
    match refused:
        case "on disk":
            event = replace(event, experts=ids(1, 4))
        case "prompt":
            event = replace(event, prefill=True)
        case "too many":
            event = replace(event, experts=ids(1, 2, 3))
        case "pinned":
            scheduler.on(Pinned(ids(3)))
        case "busy":
            scheduler.on(Idle(ids(9)))
    counts = replace(scheduler.counts)
    before = scheduler.placement.cache.state.slot_of.tolist()
    assert scheduler.resident_steps.load(event, 0.0) is None
    assert scheduler.counts == counts
    assert scheduler.placement.cache.state.slot_of.tolist() == before


@pytest.mark.parametrize("at", ["pin_step", "release"])
def test_no_expert_stays_pinned_after_an_interrupt(at):
    """Python raises at the begin of a function, before it has done anything."""
    scheduler = Scheduler(pieces(), 4, policy("lru"), lanes=1, ahead=1)
    carry_out(scheduler, scheduler.on(Routed(0, 0, ids(0, 1, 2, 3))))
    residents, interrupts = scheduler.resident_steps, list[str]()

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == at and not interrupts:
            interrupts.append(at)
            raise KeyboardInterrupt

    def step() -> None:
        sys.settrace(interrupt)
        try:
            residents.serve_pinned(Routed(1, 0, ids(0, 1, 2, 3)), 0.0)
            residents.unpin()
        finally:
            sys.settrace(None)

    with pytest.raises(KeyboardInterrupt):
        step()
    if residents.unfinished:  # as the next step finds
        residents.abandon()
    scheduler.placement.cache.pin_hits()
    assert scheduler.placement.cache.state.pinned.tolist() == [0] * OFFSETS[-1]
