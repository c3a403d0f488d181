"""The tier between two links with split experts: a second cache in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.scope import least_capacity
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Computed, Finish, Landed, Resized, Routed, StartChunk
from greenroom.core.pieces import Pieces, Split
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import (
    CompleteHostCache,
    HostTier,
    host_slot_groups,
    least_host_slots,
)
from greenroom.errors import BudgetError
from greenroom.policies import policy
from greenroom.sim.clock import TraceStep
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, carry_out, groups, ids
from tests.core.strategies import steps as steps_of
from tests.core.transfers.test_tiers import HostTierDriver, check_host
from tests.sim.small import simulate

N = OFFSETS[-1]
DEVICE_SLOTS = 8  # of 100 bytes: with 3 bottoms of 40 that is 11 tops of 60


def in_halves(secondary_slots: int = 3) -> Pieces:
    return Pieces.with_split(OFFSETS, Split((60, 60), (40, 40), secondary_slots))


def machine(every: Pieces, host: int, device: int = DEVICE_SLOTS, **options):
    tier = HostTier(every, host, policy("lru"))
    return Scheduler(every, device, policy("lru"), lanes=(1, 1), host=tier, **options), tier


def moved(actions: list) -> list[tuple[int, int]]:
    return [(a.link, a.piece) for a in actions if isinstance(a, StartChunk)]


def served(s: Scheduler, step: int, *experts: int) -> list[tuple[int, int]]:
    """Run a step to its end; the (link, piece) of every chunk that moved, in order."""
    return moved(carry_out(s, s.on(Routed(step, 0, ids(*experts))), transfers_first=True))


def test_a_step_of_a_split_expert_over_two_links_event_by_event():
    """Expert 1 is nowhere: its top crosses the bus while its bottom is read, and is computed
    while its bottom crosses the bus."""
    s, tier = machine(in_halves(), host=2)
    (top,) = s.on(Routed(0, 0, ids(1)))
    assert (top.link, top.piece, top.host_slot, top.staging_slot) == (0, 1, 0, -1)
    read_bottom, top_on = sorted(s.on(Landed(0, 1, 0)), key=lambda a: a.link)
    assert (read_bottom.piece, read_bottom.host_slot) == (N + 1, 2)  # behind the slots of tops
    assert (top_on.piece, top_on.host_slot, top_on.slot) == (1, 0, 0)
    assert groups(s.on(Landed(0, 1, 1))) == [([1], 0)]
    (bottom_on,) = s.on(Landed(0, N + 1, 0))
    assert (bottom_on.link, bottom_on.piece, bottom_on.host_slot) == (1, N + 1, 2)
    assert s.on(Computed()) == []
    assert groups(s.on(Landed(0, N + 1, 1))) == [([1], 1)]
    assert s.on(Computed()) == [Finish()]
    assert (tier.requests, tier.hits) == (2, 0)


def test_the_bottom_of_a_resident_top_comes_from_host_memory():
    """Three other bottoms take the device's slots; expert 1's top stays on the device."""
    s, tier = machine(in_halves(), host=4)
    served(s, 0, 1)
    served(s, 1, 2, 3, 4)
    assert served(s, 2, 1) == [(1, N + 1)]
    assert served(s, 3, 1) == []  # the bottom is still on the device
    assert (tier.requests, tier.hits) == (9, 1)


def test_host_memory_evicts_tops_and_bottoms_separately():
    """Expert 1's bottom is asked for again and again, its top never: the top becomes old."""
    s, tier = machine(in_halves(1), host=2)
    for step, experts in enumerate(((1,), (2,), (1,), (3,))):
        served(s, step, *experts)
    tops, bottoms = ([*each.slots()] for each in tier.caches)
    assert tops == [2, 3]
    assert bottoms == [1, 3]
    assert served(s, 4, 1) == [(1, N + 1)]


def test_layers_share_slots_of_host_memory_only_if_segments_are_of_one_size():
    assert [(n, p.tolist()) for n, p in host_slot_groups(in_halves(), 4)] == [
        (4, list(range(N))), (4, list(range(N, 2 * N))),
    ]  # fmt: skip
    uneven = Pieces.with_split(OFFSETS, Split((100, 50), (0, 50), 3))
    apart = HostTier(uneven, 5, policy("lru"))
    assert [(n, int(p[0]), p.size) for n, p in host_slot_groups(uneven, 5)] == [
        (3, 0, 6), (2, 6, 6), (3, N, 6), (2, N + 6, 6),
    ]  # fmt: skip
    check_groups(apart, [0, 7, N, N + 7])
    assert not apart.holds_all
    assert HostTier(uneven, N, policy("lru")).holds_all
    assert (least_host_slots(in_halves()), least_host_slots(uneven)) == (1, 2)
    with pytest.raises(BudgetError, match=r"room for 1 experts, but needs room for 2: .* layer"):
        HostTier(uneven, 1, policy("lru"))


def check_groups(tier: HostTier, requested: Sequence[int]) -> None:
    """Check that requested pieces get different slots, each in its own group."""
    group_of, at = {}, 0
    for size, fitting in host_slot_groups(tier.pieces, tier.capacity):
        group_of |= {slot: set(fitting.tolist()) for slot in range(at, at + size)}
        at += size
    slots = [tier.request(piece)[0] for piece in requested]
    assert len({*slots}) == len(requested)
    assert all(piece in group_of[slot] for piece, slot in zip(requested, slots, strict=True))


@pytest.mark.parametrize("more", [0, 3])
def test_every_piece_has_a_slot_of_its_group_if_host_memory_holds_all(more):
    uneven = Pieces.with_split(OFFSETS, Split((100, 50), (0, 50), 3))
    devices = Pieces.unsplit(OFFSETS, [100, 100], devices=2)
    for every in (devices, in_halves(), uneven):
        tier, requested = HostTier(every, N + more, policy("lru")), list(range(len(every)))
        assert all(isinstance(each, CompleteHostCache) for each in tier.caches)
        check_groups(tier, requested[::-1])
        for piece in requested:
            tier.release(piece, piece % 2 == 0)
        assert [tier.has(piece) for piece in requested] == [piece % 2 == 0 for piece in requested]


def test_hand_worked_seconds_of_one_split_expert_on_two_links():
    """An expert of 100 bytes in 60 and 40; disk 10 bytes/s, bus 20 bytes/s, 5 s to compute.

    First token: the top is read until 6, on the device at 9, computed until 12 (3 s); the bottom
    is read until 10, on the device at 12, computed until 14. Second token, with the bottom's slot
    taken and both parts in host memory: the top is computed at once (3 s), its bottom arrives
    after 2 s, and is computed until 5.
    """
    every = in_halves(1)
    work = Work.constant(5.0)
    speeds = Costs((Link(10.0, lanes=1), Link(20.0, lanes=1)), work, Work.constant(0.0))
    steps = [TraceStep(0, 0, ids(1))]
    tier = HostTier(every, 4, policy("lru"))
    first = simulate(steps, every, DEVICE_SLOTS, policy("lru"), costs=speeds, host=tier)
    assert first.seconds == pytest.approx(14.0)
    assert first.stall == pytest.approx(9.0)
    steps += [TraceStep(1, 0, ids(2)), TraceStep(2, 0, ids(1))]
    tier = HostTier(every, 4, policy("lru"))
    three = simulate(steps, every, DEVICE_SLOTS, policy("lru"), costs=speeds, host=tier)
    assert three.seconds == pytest.approx(14.0 + 14.0 + 5.0)
    assert three.bytes_moved == 200


@given(
    steps=steps_of(LAYERS, EXPERTS),
    device=st.integers(0, 11),
    host=st.integers(2, 13),
    lanes=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    chunks=st.integers(1, 3),
    of=st.sampled_from([((60, 60), (40, 40)), ((30, 80), (70, 20)), ((100, 50), (0, 50))]),
    scope=st.sampled_from(["shared", "per-layer"]),
    secondary_slots=st.integers(1, 7),
    named=st.sampled_from(["lru", "next-use"]),
    ahead=st.sampled_from([0, 0, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_with_split_experts(
    steps, device, host, lanes, chunks, of, scope, secondary_slots, named, ahead, failing, devices,
    seed,
):  # fmt: skip
    cut = Split(*of, secondary_slots)
    every = Pieces.with_split(OFFSETS, cut, [chunks] * N + [2] * N, devices)
    least = least_capacity(every, scope)
    tier = HostTier(every, max(host, least_host_slots(every)), policy(named), seed=seed)
    options = {"lanes": lanes, "scope": scope}
    s = Scheduler(every, least + device, policy("lru"), ahead=ahead, host=tier, **options)
    plain = Scheduler(every, least + device, policy("lru"), **options)
    driver = HostTierDriver(s, random.Random(seed), failing)
    other = type(driver).__base__(plain, random.Random(0), 0)
    alike = not ahead and not failing
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        driver.run(number, layer, experts, cancel, prefill)
        if cancel or driver.finish.failed >= 0:
            alike = False
        else:
            needed = {*experts.tolist(), *map(every.secondary_of, experts.tolist())} - {-1}
            assert sorted(driver.computed) == sorted(needed)
        if chance == 9:
            driver.send(Resized(least + seed % 12, number % 4))
            alike = False
        if alike:  # the tier changes where tops come from, never which are on the device
            other.run(number, layer, experts, False, prefill)
            assert (s.counts.hits, s.counts.misses) == (plain.counts.hits, plain.counts.misses)
            assert s.residents().tolist() == plain.residents().tolist()
    while driver.moving:
        driver.land()
    assert len(s.transfers.entries) == 0
    check_host(tier, driver)
