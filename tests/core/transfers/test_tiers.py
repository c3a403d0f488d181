"""The tier between two links: its residents, and the source of every byte."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Landed, Resized, Routed, StartChunk
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.queue import TransferQueue
from greenroom.core.transfers.tiers import HostCache, HostTier
from greenroom.policies import policy
from greenroom.sim.clock import TraceStep
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, RandomDriver, carry_out, ids, pieces
from tests.core.strategies import steps
from tests.sim.small import simulate


def machine(device: int, host: int, chunks: int = 1, named: str = "lru", ahead: int = 0):
    every = pieces(chunks)
    tier = HostTier(every, host, policy(named))
    return Scheduler(every, device, policy(named), lanes=(1, 2), ahead=ahead, host=tier), tier


def served(s: Scheduler, step: int, *experts: int, prefill: bool = False) -> list[tuple[int, int]]:
    """Run a step to its end; the (link, piece) of every chunk that moved, in order."""
    done = carry_out(s, s.on(Routed(step, 0, ids(*experts), prefill=prefill)))
    return [(a.link, a.piece) for a in done if isinstance(a, StartChunk)]


def test_an_evicted_expert_returns_over_the_last_link_only():
    s, tier = machine(device=1, host=3)
    assert served(s, 0, 1) == [(0, 1), (1, 1)]
    assert served(s, 1, 2) == [(0, 2), (1, 2)]
    assert served(s, 2, 1) == [(1, 1)]
    assert (tier.requests, tier.hits) == (3, 1)
    assert served(s, 3, 1) == []  # on the device: the tier is not asked


def test_the_tier_evicts_by_its_own_policy():
    s, tier = machine(device=1, host=2)
    for step, expert in enumerate((1, 2, 1, 3)):
        served(s, step, expert)
    assert [*tier.caches[0].slots()] == [1, 3]  # 2 was asked for longest ago
    assert served(s, 4, 2) == [(0, 2), (1, 2)]


def test_a_prompt_fills_free_host_slots_and_evicts_no_expert():
    s, tier = machine(device=1, host=3)
    served(s, 0, 1)
    served(s, 1, 2)
    assert served(s, 2, 3, 4, 5, prefill=True) == [(k, e) for e in (3, 4, 5) for k in (0, 1)]
    assert [*tier.caches[0].slots()] == [1, 2, 3]
    assert not tier.leases


def test_more_transfers_than_tier_slots_go_through_staging_slots():
    s, tier = machine(device=6, host=1)
    moving = s.on(Routed(0, 0, ids(1, 2)))
    assert [(a.host_slot, a.staging_slot >= 0) for a in moving] == [(0, False)]
    (second, _) = s.on(Landed(moving[0].lane, 1, 0))[::-1]
    assert (second.piece, second.host_slot, second.staging_slot >= 0) == (2, -1, True)
    assert [*tier.caches[0].slots()] == [1]


def test_an_incomplete_expert_does_not_stay_in_host_memory():
    tier = HostTier(pieces(2), 2, policy("lru"))
    queue = TransferQueue((1, 1), host=tier)
    entry = queue.add(4, 0, 2)
    first = next(queue.start())
    assert (first.staging_slot, entry.host_slot, first.first_of_piece) == (-1, 0, True)
    queue.land(0, first.lane)
    queue.drop(4)  # its only chunk so far is in host memory, and nothing of it moves
    assert 4 not in queue.entries
    assert [*tier.caches[0].slots()] == []
    entry = queue.add(4, 0, 2)
    assert not entry.host_resident


def test_a_complete_expert_stays_in_host_memory_after_a_device_failure():
    tier = HostTier(pieces(), 2, policy("lru"))
    queue = TransferQueue((1, 1), host=tier)
    queue.add(4, 0, 1)
    queue.land(0, next(queue.start()).lane)
    queue.land(1, next(queue.start()).lane, ok=False)
    assert 4 not in queue.entries
    assert queue.add(4, 0, 1).host_resident
    again = next(queue.start())
    assert (again.link, again.first_of_piece) == (1, True)


def test_a_host_tier_needs_two_links():
    tier = HostTier(pieces(), 2, policy("lru"))
    with pytest.raises(ValueError, match="needs a chain of two links, got 1"):
        TransferQueue((2,), host=tier)


def test_the_last_link_sets_the_pace_if_host_memory_holds_all_experts():
    every = pieces()
    assert TransferQueue((1, 1), host=HostTier(every, len(every), policy("lru"))).paced == {1}
    assert TransferQueue((1, 1), host=HostTier(every, len(every) - 1, policy("lru"))).paced == {0}


class HostTierDriver(RandomDriver):
    """A driver with a host tier: `host[slot]` is (piece, its chunks that have been read)."""

    def __init__(self, s: Scheduler, rng: random.Random, failing: float) -> None:
        super().__init__(s, rng, failing)
        self.host: dict[int, tuple[int, set[int]]] = {}

    def _start(self, action: StartChunk) -> None:
        assert (action.link, action.lane) not in {(m.link, m.lane) for m in self.moving}
        if action.host_slot >= 0:
            assert action.staging_slot < 0
            piece, chunks = self.host.get(action.host_slot, (-1, set()))
            if action.link == 0:
                if piece != action.piece or action.chunk == 0:
                    users = {m.piece for m in self.moving if m.host_slot == action.host_slot}
                    assert not users, "a slot of the tier is overwritten while it is read"
                    self.host[action.host_slot] = action.piece, set()
                assert action.chunk not in self.host[action.host_slot][1]
            else:
                assert piece == action.piece, "the slot of the tier holds another piece"
                assert action.chunk in chunks, "the chunk is not in host memory"
        elif action.link == 0:
            assert action.staging_slot not in {
                m.staging_slot for m in self.moving if m.host_slot < 0
            }
            self.staging_slots[action.staging_slot] = action.piece, action.chunk
        else:
            assert self.staging_slots[action.staging_slot] == (action.piece, action.chunk)
        self._check_home_device(action)
        if action.first_of_piece:
            self.landed = {k: n for k, n in self.landed.items() if k[0] != action.piece}
            self.landed[action.piece, action.slot] = 0
        if action.link in self.lasts:
            self.memory.pop(action.slot, None)
            self._check_no_overwrite(action)
        self.moving.append(action)

    def _arrived(self, action: StartChunk) -> None:
        if action.link == 0 and action.host_slot >= 0:
            self.host[action.host_slot][1].add(action.chunk)
        super()._arrived(action)


def check_host(tier: HostTier, driver: HostTierDriver) -> None:
    """Check that nothing is pinned in host memory, and that residents have all of their bytes."""
    assert not tier.leases
    for number, each in enumerate(tier.caches):
        if isinstance(each, HostCache):
            assert not each.cache.state.pinned.any()
            assert not any(each.pinned.values())
        for expert, place in each.slots().items():
            slot, piece = number * tier.capacity + place, number * tier.pieces.experts + expert
            chunks = int(tier.pieces.chunks[piece])
            assert driver.host[slot] == (piece, set(range(chunks)))


@given(
    steps=steps(LAYERS, EXPERTS),
    device=st.integers(2, 13),
    host=st.integers(1, 13),
    lanes=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    chunks=st.integers(1, 3),
    named=st.sampled_from(["lru", "next-use"]),
    ahead=st.sampled_from([0, 0, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_any_order_of_events_and_any_size_of_the_tier(
    steps, device, host, lanes, chunks, named, ahead, failing, devices, seed
):
    device, host = max(device, devices), max(host, devices)
    every = pieces(chunks, devices)
    tier = HostTier(every, host, policy(named), seed=seed)
    s = Scheduler(every, device, policy("lru"), lanes=lanes, ahead=ahead, host=tier)
    plain = Scheduler(every, device, policy("lru"), lanes=lanes, ahead=0)
    driver, other = (
        HostTierDriver(s, random.Random(seed), failing),
        RandomDriver(plain, random.Random(0), 0),
    )
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
            assert sorted(driver.computed) == experts.tolist()
        if chance == 9:
            driver.send(Resized(devices + seed % 13, number % 4))
            alike = False
        if alike:  # the tier changes where pieces come from, never who has a slot on the device
            other.run(number, layer, experts, False, prefill)
            assert s.counts == plain.counts
            assert s.residents().tolist() == plain.residents().tolist()
    while driver.moving:
        driver.land()
    assert len(s.transfers.entries) == 0
    check_host(tier, driver)


def steps_of(seed: int, passes: int) -> list[TraceStep]:
    rng = random.Random(seed)
    return [
        TraceStep(p, layer, ids(*sorted(OFFSETS[layer] + e for e in rng.sample(range(EXPERTS), 2))))
        for p in range(passes)
        for layer in range(LAYERS)
    ]


def costs(disk: float, bus: float) -> Costs:
    links = (Link(disk, lanes=1), Link(bus, lanes=2))
    return Costs(links, Work.constant(0.0), Work.constant(0.0))


def test_a_simulated_host_tier_saves_only_disk_reads():
    steps, every = steps_of(3, 40), pieces()
    slow, runs = costs(1.0, 10.0), {}
    for host in (0, 4, 12):
        tier = HostTier(every, host, policy("lru")) if host else None
        runs[host] = simulate(steps, every, 3, policy("lru"), costs=slow, host=tier)
    assert len({run.misses for run in runs.values()}) == 1
    assert runs[12].bytes_moved == 100 * len({e for s in steps for e in s.experts.tolist()})
    assert runs[0].bytes_moved == 100 * runs[0].misses
    assert runs[12].seconds < runs[4].seconds < runs[0].seconds
    everything = runs[12]
    least = 100 / 10 * everything.misses  # every miss still crosses the last link
    assert everything.seconds >= least
