"""The event machine with the host's processor: who is computed where, from which bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.build import build_scheduler
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import (
    HOST,
    Cancelled,
    Computed,
    ComputeGroup,
    Failed,
    Finish,
    Landed,
    Resized,
    Routed,
    StartChunk,
)
from greenroom.core.options.rules.cocompute import CoCompute
from greenroom.core.options.rules.rates import Rates
from greenroom.core.pieces import Copies, Pieces, Split
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import UsageError
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, carry_out, ids, pieces
from tests.core.strategies import steps as steps_of
from tests.core.transfers.test_tiers import HostTierDriver

HOST_FIRST, DEVICE_FIRST = (10.0, 0.1), (0.1, 10.0)  # seconds on the bus, on the host


def costs(bus: float, host: float) -> Costs:
    return Costs(
        (Link(100.0), Link(100 / bus)), Work.constant(0.0), Work.constant(0.0),
        host=Work.constant(host),
    )  # fmt: skip


def rates(bus: float, host: float, devices: int = 1, learn: bool = False) -> Rates:
    return Rates(costs(bus, host), 100, devices, learn)


def machine(device: int, host: int, speeds: tuple[float, float], ahead: int = 0, chunks: int = 1):
    every = pieces(chunks)
    tier = HostTier(every, host, policy("lru"))
    s = Scheduler(
        every,
        device,
        policy("lru"),
        lanes=(1, 2),
        ahead=ahead,
        host=tier,
        options=[CoCompute(rates(*speeds))],
    )
    return s, tier


def groups(actions: list) -> list[tuple[int, list[int]]]:
    return [(a.device, a.experts.tolist()) for a in actions if isinstance(a, ComputeGroup)]


def fill(s: Scheduler, *experts: int) -> None:
    """Bring experts to host memory, and let the device have the last ones."""
    for number, expert in enumerate(experts):
        carry_out(s, s.on(Routed(number, 0, ids(expert), device_only=True)))


def test_a_miss_is_computed_from_its_slot_in_host_memory():
    s, tier = machine(device=1, host=6, speeds=HOST_FIRST)
    fill(s, 1, 2, 3)
    (group,) = s.on(Routed(3, 0, ids(1)))
    assert (group.device, group.experts.tolist()) == (HOST, [1])
    assert group.slots.tolist() == [tier.caches[0].slots()[1]]
    assert tier.leases == {1}  # nobody else gets that slot meanwhile
    assert s.on(Computed(HOST)) == [Finish()]
    assert not tier.leases
    assert s.residents().tolist() == [3]  # it has taken nobody's place
    assert (s.counts.requests, s.counts.misses, s.counts.on_host) == (4, 4, 1)


def test_all_misses_are_moved_if_the_link_is_faster():
    s, _ = machine(device=1, host=6, speeds=DEVICE_FIRST)
    fill(s, 1, 2, 3)
    (chunk,) = s.on(Routed(3, 0, ids(1)))
    assert (chunk.link, chunk.piece) == (1, 1)
    assert s.counts.on_host == 0


def test_device_and_host_compute_at_the_same_time():
    s, _ = machine(device=1, host=6, speeds=HOST_FIRST)
    fill(s, 1, 2, 3)
    assert groups(s.on(Routed(3, 0, ids(1, 3)))) == [(HOST, [1]), (0, [3])]
    assert s.on(Computed(0)) == []
    assert s.on(Computed(HOST)) == [Finish()]


def test_a_skipped_miss_has_its_own_expert_group_after_the_host_s():
    """A skipped expert is a request of the step, but not of the cache; tokens are counted."""
    precision = pytest.importorskip("greenroom.core.options.rules.precision").precision
    every = pieces()
    tier = HostTier(every, 6, policy("lru"))
    s = Scheduler(
        every, 1, policy("lru"), lanes=(1, 2), host=tier,
        options=[
            precision(Approximation(skip=0.2), every), CoCompute(rates(*HOST_FIRST, learn=True)),
        ],
    )  # fmt: skip
    fill(s, 1, 2, 3)
    tokens, tail_weights = np.array([2, 1, 1]), np.array([1.0, 0.1, 0.5], np.float32)
    actions = s.on(Routed(3, 0, ids(1, 2, 3), rows=tokens, tail_weights=tail_weights))
    assert groups(actions) == [(HOST, [1]), (0, [3])]
    assert s.on(Computed(0)) == []
    assert groups(s.on(Computed(HOST))) == [(0, [2])]
    assert s.on(Computed(0)) == [Finish()]
    assert (s.counts.on_host, s.counts.skipped, s.counts.misses) == (1, 1, 5)


def test_an_expert_for_the_host_is_read_into_host_memory_only():
    s, tier = machine(device=1, host=6, speeds=HOST_FIRST, chunks=2)
    first = s.on(Routed(0, 0, ids(4)))[0]
    assert (first.link, first.slot, first.host_slot, first.first_of_piece) == (0, -1, 0, True)
    (second,) = s.on(Landed(0, 4))
    assert groups(s.on(Landed(0, 4))) == [(HOST, [4])]
    assert (second.chunk, len(s.transfers.entries)) == (1, 0)
    assert s.on(Computed(HOST)) == [Finish()]
    assert [*tier.caches[0].slots()] == [4]
    assert not tier.leases


def test_a_failed_read_ends_the_step_and_leaves_no_expert_in_host_memory():
    s, tier = machine(device=1, host=6, speeds=HOST_FIRST)
    s.on(Routed(0, 0, ids(4)))
    assert s.on(Failed(0, 4)) == [Finish(failed=4)]
    assert [*tier.caches[0].slots()] == []
    assert not s.placement.cache.state.pinned.any()


def test_a_cancelled_step_returns_its_host_slots():
    s, tier = machine(device=1, host=6, speeds=HOST_FIRST)
    fill(s, 1, 2, 3)
    s.on(Routed(3, 0, ids(1, 2)))
    assert s.on(Cancelled()) == [Finish()]
    assert not tier.leases
    assert not s.placement.cache.state.pinned.any()


def test_a_miss_without_a_host_slot_is_moved_to_the_device():
    s, _ = machine(device=4, host=1, speeds=HOST_FIRST)
    actions = s.on(Routed(0, 0, ids(1, 2)))
    assert s.counts.on_host == 1  # the tier has one slot, and reads the first into it
    moved = [a.piece for a in actions if isinstance(a, StartChunk)]
    assert moved == [1]
    actions = s.on(Landed(0, 1))
    (chunk,) = [a for a in actions if isinstance(a, StartChunk)]
    assert (chunk.piece, chunk.staging_slot >= 0) == (2, True)
    assert groups(actions) == [(HOST, [1])]


def test_an_expert_that_the_host_computed_is_promoted_while_the_link_is_idle():
    s, tier = machine(device=4, host=12, speeds=HOST_FIRST, ahead=1)
    fill(s, 1, 2, 3, 4, 5)
    assert s.residents().tolist() == [2, 3, 4, 5]
    s.on(Routed(5, 0, ids(1)))
    chunk, finish = s.on(Computed(HOST))
    assert (chunk.piece, chunk.link, chunk.demand, finish) == (1, 1, False, Finish())
    assert s.on(Landed(chunk.lane, 1, 1)) == []
    assert s.residents().tolist() == [1, 3, 4, 5]
    assert (s.counts.on_host, s.counts.prefetches, s.counts.promoted) == (1, 1, 1)
    assert not s.placement.buffer.borrowed
    assert not tier.leases
    assert groups(s.on(Routed(6, 0, ids(1)))) == [(0, [1])]


def test_an_expert_requested_during_its_promotion_is_moved():
    s, _ = machine(device=4, host=12, speeds=HOST_FIRST, ahead=1)
    fill(s, 1, 2, 3, 4, 5)
    s.on(Routed(5, 0, ids(1)))
    chunk, _ = s.on(Computed(HOST))
    assert s.on(Routed(6, 0, ids(1))) == []
    assert groups(s.on(Landed(chunk.lane, 1, 1))) == [(0, [1])]
    assert (s.counts.on_host, s.counts.late, s.counts.promoted) == (1, 1, 0)


def test_a_prompt_s_experts_are_not_promoted():
    s, _ = machine(device=4, host=12, speeds=HOST_FIRST, ahead=1)
    fill(s, 1, 2, 3, 4, 5)
    s.on(Routed(5, 0, ids(1), prefill=True))
    assert s.on(Computed(HOST)) == [Finish()]


def test_co_compute_needs_a_cache_in_host_memory():
    with pytest.raises(UsageError, match="needs a cache of experts in host memory"):
        build_scheduler(
            pieces(),
            4,
            policy("lru"),
            SchedulerConfig(co_compute="auto"),
            lanes=(1, 1),
            costs=costs(1.0, 1.0),
            expert_bytes=100,
        )


class HostComputeDriver(HostTierDriver):
    """A driver whose host also computes, from host slots with complete experts."""

    def _check_slots(self, group: ComputeGroup) -> None:
        if group.device != HOST:
            super()._check_slots(group)
            return
        chunks = self.s.pieces.chunks
        for piece, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
            assert self.host[slot] == (piece, set(range(chunks[piece])))

    def land(self) -> None:
        """Predict experts in the midst of a step, also some that the host computes."""
        if self.s.step is not None and self.rng.random() < 0.3:
            self.predict(self.s.step.layer, self.rng.randrange(1000))
        if self.moving:
            super().land()

    def _start(self, action: StartChunk) -> None:
        if action.link == 0 and action.host_slot >= 0 and HOST in self.groups:
            assert action.host_slot not in self.groups[HOST].slots, (
                "read over what is computed from"
            )
        super()._start(action)

    def _check_home_device(self, action: StartChunk) -> None:
        if action.slot >= 0:
            super()._check_home_device(action)

    def _check_no_overwrite(self, action: StartChunk) -> None:
        groups = (group for device, group in self.groups.items() if device != HOST)
        assert not any(action.slot in group.slots for group in groups)


@given(
    steps=steps_of(LAYERS, EXPERTS),
    device=st.integers(2, 13),
    host=st.integers(1, 13),
    lanes=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    chunks=st.integers(1, 3),
    speeds=st.sampled_from([HOST_FIRST, DEVICE_FIRST, (1.0, 1.0), (1.0, 0.4)]),
    learn=st.booleans(),
    ahead=st.sampled_from([0, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    devices=st.sampled_from([1, 1, 2]),
    scope=st.sampled_from(["shared", "per-layer"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_events_computes_every_expert_once_from_its_own_bytes(
    steps, device, host, lanes, chunks, speeds, learn, ahead, failing, devices, scope, seed
):
    groups = devices * (LAYERS if scope == "per-layer" else 1)
    device, host = max(device, groups), max(host, devices)
    every = pieces(chunks, devices)
    tier = HostTier(every, host, policy("lru"), seed=seed)
    s = Scheduler(
        every, device, policy("lru"), lanes=lanes, ahead=ahead, host=tier, scope=scope,
        options=[CoCompute(rates(*speeds, devices, learn))],
    )  # fmt: skip
    driver = HostComputeDriver(s, random.Random(seed), failing)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        driver.run(number, layer, experts, cancel, prefill)
        if not cancel and driver.finish.failed < 0:
            assert sorted(driver.computed) == experts.tolist()
        if chance == 9:
            driver.send(Resized(groups + seed % 13, number % 4))
        for piece in s.residents().tolist():
            assert driver.memory[s.placement.slot(piece)] == piece
        assert not s.placement.cache.state.pinned.any()
    while driver.moving:
        driver.land()
    assert len(s.transfers.entries) == 0
    assert not tier.leases
    assert not tier.leases
    borrowed = len(s.placement.buffer.borrowed)
    assert (
        borrowed + int(s.placement.cache.state.free_count.sum()) + s.residents().size == s.capacity
    )
    c = s.counts
    over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed + c.promoted
    assert over + borrowed == c.prefetches


def test_co_compute_that_moves_every_miss_acts_like_no_option():
    """A machine configured to move everything acts as a machine without rates."""
    every = pieces()
    plain = Scheduler(every, 3, policy("lru"), lanes=(1, 1), host=HostTier(every, 5, policy("lru")))
    s = Scheduler(
        every, 3, policy("lru"), lanes=(1, 1), host=HostTier(every, 5, policy("lru")),
        options=[CoCompute(rates(*DEVICE_FIRST))],
    )  # fmt: skip
    for scheduler in (plain, s):
        driver, rng = HostTierDriver(scheduler, random.Random(0), 0.0), random.Random(4)
        for number in range(40):
            layer = rng.randrange(LAYERS)
            chosen = sorted(rng.sample(range(EXPERTS), 2))
            driver.run(number, layer, ids(*(OFFSETS[layer] + e for e in chosen)), False, False)
    assert s.counts == plain.counts
    assert s.residents().tolist() == plain.residents().tolist()


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("--split", Pieces.with_split(OFFSETS, Split((60, 60), (40, 40), 4))),
        (
            "--miss-precision",
            Pieces.with_copies(OFFSETS, Copies.of(100, 0.25, LAYERS, 4, nested=False)),
        ),
    ],
)
def test_segments_and_copies_are_not_computed_on_the_host(name, every):
    with pytest.raises(UsageError, match=f"--co-compute auto and {name} exclude each other"):
        Scheduler(
            every, 8, policy("lru"), lanes=(1, 2), host=HostTier(every, 6, policy("lru")),
            options=[CoCompute(rates(*HOST_FIRST))],
        )  # fmt: skip
