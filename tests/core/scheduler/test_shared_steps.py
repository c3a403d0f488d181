"""Steps whose missing experts a device and the host share, without events."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import (
    HOST,
    Action,
    Computed,
    ComputeGroup,
    Finish,
    HostComputed,
    Landed,
    Predicted,
    Routed,
    StartChunk,
)
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, carry_out, ids, pieces
from tests.core.scheduler.test_resident_steps import NAMES, routed, shown, state
from tests.core.strategies import steps

CoCompute = pytest.importorskip("greenroom.core.options.rules.cocompute").CoCompute
Rates = pytest.importorskip("greenroom.core.options.rules.rates").Rates

HOST_FIRST, BOTH = (10.0, 0.1), (1.0, 0.8)  # seconds on the bus, on the host


def sharing(
    name: str,
    capacity: int,
    host: int,
    speeds: tuple[float, float],
    ahead: int = 0,
    learn: bool = False,
) -> Scheduler:
    links = Link(100.0), Link(100 / speeds[0])
    costs = Costs(links, Work.constant(0.07), Work.constant(0.0), host=Work.constant(speeds[1]))
    return Scheduler(
        pieces(), capacity, policy(name), lanes=(1, 1), ahead=ahead,
        host=HostTier(pieces(), host, policy("lru")),
        options=[CoCompute(Rates(costs, 100, learn=learn))],
    )  # fmt: skip


def fill(scheduler: Scheduler, *experts: int) -> None:
    """Bring experts to host memory, and let the device have the last ones."""
    for number, expert in enumerate(experts):
        event = Routed(number, int(expert >= EXPERTS), ids(expert), device_only=True)
        carry_out(scheduler, scheduler.on(event))


def on_any_lane(action: Action) -> object:
    """Show an action; lanes have their turns in the order in which earlier chunks ended."""
    return replace(action, lane=0) if isinstance(action, StartChunk) else shown(action)


def leases(scheduler: Scheduler) -> set[int]:
    assert scheduler.transfers.host is not None
    return scheduler.transfers.host.leases


@pytest.mark.parametrize(
    ("slow", "moved", "on_host"), [("lanes", [1], [2]), ("copies in order", [], [1, 2])]
)
def test_copies_in_order_have_a_rate_of_their_own(slow, moved, on_host):
    """Threads that promote experts wait for more than the link."""
    scheduler = sharing("lru", 2, 6, BOTH, learn=True)
    fill(scheduler, 1, 2, 3, 4, 5)
    (option,) = scheduler.options
    for _ in range(50):
        if slow == "lanes":
            option.started(1, 0, now=0.0)
            option.landed(1, 0, 100.0, now=8.0)
            option.rates._landed[1] = 0.0
        else:
            option.copied(100, 8.0)
    misses = scheduler.resident_steps.load(Routed(5, 0, ids(1, 2)), 0.0)
    assert (misses.loads.pieces, list(misses.on_host)) == (moved, on_host)


def test_copies_in_order_are_tried_before_the_host_computes_all_misses():
    """Without a measurement, a link that seems slow would never be used."""
    scheduler = sharing("lru", 2, 6, HOST_FIRST, learn=True)
    fill(scheduler, 1, 2, 3, 4, 5)
    (option,) = scheduler.options
    moved = []
    for number in range(6):
        misses = scheduler.resident_steps.load(Routed(5 + number, 0, ids(1, 2)), 0.0)
        moved.append(misses.loads.size)
        scheduler.on(HostComputed(0, misses.on_host, 0.1), 0.0)
        if misses.loads.size:
            scheduler.resident_steps.undo(misses, Routed(5 + number, 0, ids(1, 2)))
            option.copied(100, 10.0)
    assert moved == [1, 1, 1, 1, 0, 0]
    for _ in range(100):
        option.copied(100, 0.01)
    misses = scheduler.resident_steps.load(Routed(11, 0, ids(1, 2)), 0.0)
    assert misses.loads.size > 0


def test_the_host_takes_the_last_misses_and_gets_no_slot_for_them():
    scheduler = sharing("lru", 2, 6, BOTH)
    fill(scheduler, 1, 2, 3, 4, 5)
    tier = scheduler.transfers.host
    assert tier is not None
    slots = tier.caches[0].slots()
    before = scheduler.residents().tolist()
    assert before == [4, 5]
    misses = scheduler.resident_steps.load(Routed(5, 0, ids(1, 2)), 0.0)
    assert misses is not None
    assert misses.loads.pieces == [1]
    assert misses.loads.host_slots == [slots[1]]
    assert (misses.on_host, misses.host_slots) == ([2], [slots[2]])
    assert leases(scheduler) == {2}
    assert (scheduler.counts.requests, scheduler.counts.hits) == (7, 0)
    assert scheduler.counts.on_host == 1
    assert scheduler.residents().tolist() == [1, 5]
    assert scheduler.step is None
    assert scheduler.on(HostComputed(0, misses.on_host, 0.5)) == []
    assert not leases(scheduler)


def test_a_step_that_the_device_must_compute_alone_is_not_shared():
    scheduler = sharing("lru", 2, 6, HOST_FIRST)
    fill(scheduler, 1, 2, 3)
    misses = scheduler.resident_steps.load(Routed(3, 0, ids(1), device_only=True), 0.0)
    assert misses is not None
    assert misses.loads.pieces == [1]
    assert misses.on_host == ()


def test_what_failed_is_taken_back():
    scheduler = sharing("lru", 2, 6, BOTH)
    fill(scheduler, 1, 2, 3, 4, 5)
    event = Routed(5, 0, ids(1, 2))
    misses = scheduler.resident_steps.load(event, 0.0)
    assert misses is not None
    scheduler.resident_steps.undo(misses, event)
    assert scheduler.residents().tolist() == [5]
    assert not leases(scheduler)


def test_what_the_host_has_computed_comes_to_a_slot_while_later_steps_go_on():
    scheduler = sharing("lru", 4, 12, HOST_FIRST, ahead=1)
    fill(scheduler, 7, 0, 1, 2, 3, 4, 5, 6)
    assert scheduler.residents().tolist() == [3, 4, 5, 6]
    misses = scheduler.resident_steps.load(Routed(8, 0, ids(0, 5)), 0.0)
    assert misses is not None
    assert (misses.loads.size, misses.on_host) == (0, [0])
    (chunk,) = scheduler.on(HostComputed(0, [0], 0.5))
    assert isinstance(chunk, StartChunk)
    assert (chunk.piece, chunk.link) == (0, 1)
    residents = scheduler.resident_steps
    assert residents.serve(Routed(8, 1, ids(6)), 0.0) is not None  # another layer's step
    failed = residents.load(Routed(9, 1, ids(7)), 0.0)
    assert failed is not None
    assert scheduler.on(HostComputed(1, failed.on_host, 0.0)) == []  # a failure promotes nothing
    assert leases(scheduler) == {0}
    assert residents.load(Routed(10, 0, ids(0)), 0.0) is None  # on its way: an event waits for it
    assert residents.load(Routed(10, 0, ids(1, 2, 4, 5)), 0.0) is None  # needs all slots
    assert scheduler.on(Landed(chunk.lane, 0, 1)) == []
    assert scheduler.counts.promoted == 1
    assert 0 in scheduler.residents()
    assert not leases(scheduler)
    assert not scheduler.transfers.entries


@pytest.mark.parametrize("host", [6, 12])
def test_a_prediction_fetches_nothing_that_the_host_computes_meanwhile(host):
    """A slot in host memory has one user at a time: the host, or a transfer."""
    scheduler = sharing("lru", 4, host, HOST_FIRST, ahead=2)
    fill(scheduler, 0, 1, 2, 3, 4, 5)
    misses = scheduler.resident_steps.load(Routed(6, 0, ids(0, 5)), 0.0)
    assert misses is not None
    assert misses.on_host == [0]
    started = scheduler.on(Predicted(0, ids(0, 1), certain=True))
    assert [a.piece for a in started if isinstance(a, StartChunk)] == [1]
    assert leases(scheduler) == {0, 1}
    moving = [*started, *scheduler.on(HostComputed(0, misses.on_host, 0.5))]
    check_slots(scheduler)
    while moving:
        moving += land(scheduler, moving)
    assert not leases(scheduler)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(
    steps(LAYERS, EXPERTS, 40), st.integers(2, 11), st.integers(1, 12),
    st.sampled_from((HOST_FIRST, BOTH, (0.1, 10.0))),
)  # fmt: skip
def test_misses_are_shared_as_by_events(name, requests, capacity, host, speeds):
    ours, plain = (sharing(name, capacity, host, speeds) for _ in range(2))
    for number, request in enumerate(requests):
        event = routed(number, *request)
        at_hand = [
            ours.placement.has_slot(e) or ours.transfers.host.has(e)  # type: ignore[union-attr]
            for e in event.experts.tolist()
        ]
        possible = all(at_hand) and len(at_hand) <= capacity and not event.prefill
        actions = carry_out(plain, plain.on(event, number))
        misses = ours.resident_steps.load(event, number)
        assert (misses is not None) == possible
        if misses is None:
            done = carry_out(ours, ours.on(event, number))
            assert [*map(on_any_lane, done)] == [*map(on_any_lane, actions)]
        else:
            chunks = [a for a in actions if isinstance(a, StartChunk)]
            expected = [(chunk.piece, chunk.slot, chunk.host_slot) for chunk in chunks]
            assert [*map(tuple, misses.loads.numbers.T.tolist())] == expected
            on_host = [a for a in actions if isinstance(a, ComputeGroup) and a.device == HOST]
            assert [*misses.on_host] == [e for group in on_host for e in group.experts.tolist()]
            assert [*misses.host_slots] == [s for group in on_host for s in group.slots.tolist()]
            if misses.on_host:
                assert ours.on(HostComputed(event.layer, misses.on_host, 1.0), number) == []
        assert state(ours) == state(plain)
        tiers = [s.transfers.host for s in (ours, plain)]
        assert tiers[0] is not None
        assert tiers[1] is not None
        assert tiers[0].caches[0].slots() == tiers[1].caches[0].slots()
        assert (tiers[0].requests, tiers[0].hits) == (tiers[1].requests, tiers[1].hits)
        assert not tiers[0].leases


def finish(scheduler: Scheduler, actions: list[Action], moving: list[Action]) -> list[Action]:
    """Carry out a step's actions, chunks in their order; return the chunks still under way."""
    moving, groups = moving[:], list[ComputeGroup]()
    while True:
        groups += [a for a in actions if isinstance(a, ComputeGroup)]
        moving += [a for a in actions if isinstance(a, StartChunk)]
        if any(isinstance(action, Finish) for action in actions):
            return moving
        actions = (
            scheduler.on(Computed(groups.pop(0).device)) if groups else land(scheduler, moving)
        )


def land(scheduler: Scheduler, moving: list[Action]) -> list[Action]:
    chunk = moving.pop(0)
    assert isinstance(chunk, StartChunk)
    return scheduler.on(Landed(chunk.lane, chunk.piece, chunk.link))


def check_slots(scheduler: Scheduler) -> None:
    """Check that no slot has two experts, and that none is lost."""
    placement, cache = scheduler.placement, scheduler.placement.cache.state
    slots = cache.slot_of[cache.slot_of >= 0].tolist()
    slots += [entry.slot for entry in placement.buffer.borrowed.values()]
    assert len({*slots}) == len(slots) == scheduler.capacity - int(cache.free_count.sum())
    assert leases(scheduler) <= scheduler.transfers.entries.keys()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(steps(LAYERS, EXPERTS, 40), st.integers(4, 11), st.integers(1, 12))
def test_steps_are_shared_beside_promotions(name, requests, capacity, host):
    """Chunks land at any time between steps, and while the host computes."""
    scheduler, moving = sharing(name, capacity, host, HOST_FIRST, ahead=4), list[Action]()
    for number, request in enumerate(requests):
        digit, event = request[2], routed(number, *request)
        for _ in range(digit % 3):
            if moving:
                moving += land(scheduler, moving)
        before = scheduler.residents().tolist()
        misses = scheduler.resident_steps.load(event, number)
        if misses is None:
            moving = finish(scheduler, scheduler.on(event, number), moving)
        else:
            borrowed = {entry.slot for entry in scheduler.placement.buffer.borrowed.values()}
            tier_slots = scheduler.placement.tier_slots[[*borrowed]].tolist() if borrowed else []
            assert not {*misses.loads.slots} & {*tier_slots}
            assert not {*misses.on_host} & {*before}
            assert not {*misses.on_host} & scheduler.transfers.entries.keys()
            assert {*misses.on_host} <= leases(scheduler)
            if moving and digit > 5:
                moving += land(scheduler, moving)
            if digit % 2:  # another thread's prediction
                moving += scheduler.on(Predicted(event.layer, event.experts, certain=True))
                if moving and digit > 3:
                    moving += land(scheduler, moving)
            if misses.on_host:
                moving += scheduler.on(HostComputed(event.layer, misses.on_host, 1.0), number)
        check_slots(scheduler)
    while moving:
        moving += land(scheduler, moving)
    check_slots(scheduler)
    assert not scheduler.transfers.entries
    left = scheduler.placement.buffer.borrowed.values()  # of prompts, which prefetch
    assert not any(entry.promotion for entry in left)
    assert not leases(scheduler)


def test_prefetches_are_dropped_before_an_interrupt_is_raised(monkeypatch):
    """Else one that is half dropped would be in no queue, and a step that needs it would wait."""
    scheduler, done = sharing("lru", 4, 12, HOST_FIRST, ahead=1), list[str]()
    fill(scheduler, 0, 1, 2, 3)

    def routed(event: Routed, now: float) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all")

    monkeypatch.setattr(scheduler.prefetcher, "routed", routed)
    monkeypatch.setattr(scheduler.transfers, "busy", True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            scheduler.resident_steps.serve(Routed(9, 0, ids(0, 1)), 0.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all"]
