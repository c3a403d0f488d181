"""Experts over devices: the hash's laws, slots in proportion, and the event machine with two."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import least_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.events import Computed, ComputeGroup, Landed, Resized, Routed
from greenroom.core.home_devices import home_devices, slots_per_device, spread
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import POLICIES, policy
from tests.core.random_driver import RandomDriver, ids, pieces
from tests.policies.plain import plain_policies


@given(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(1, 9))
def test_the_hash_is_even_in_every_layer(counts, devices):
    offsets = np.concatenate([[0], np.cumsum(counts)]).tolist()
    if devices > offsets[-1]:
        with pytest.raises(UsageError, match="can be spread over 1 to"):
            home_devices(offsets, range(devices))
        return
    home = home_devices(offsets, range(devices))
    for layer, count in enumerate(counts):
        mine = home[offsets[layer] : offsets[layer + 1]]
        assert mine.tolist() == [(layer + e) % devices for e in range(count)]
        loads = np.bincount(mine, minlength=devices)
        assert loads.max() - loads.min() <= 1


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("layers", "experts"), [(16, 64), (48, 128), (36, 32), (61, 256), (26, 60)]
)
def test_no_device_has_a_percent_more_than_its_share_of_a_real_model(devices, layers, experts):
    load = np.bincount(
        home_devices(range(0, layers * experts + 1, experts), range(devices)), minlength=devices
    )
    assert load.max() / load.mean() < 1.01


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_experts_of_a_token_are_as_even_as_by_chance(devices):
    """Experts of a step on the busiest device, compared with randomly assigned devices."""
    rng = np.random.default_rng(1)
    home = home_devices(range(0, 16 * 64 + 1, 64), range(devices))
    drawn, hashed = [], []
    for _ in range(4000):
        chosen = rng.permutation(64)[:8] + 64 * rng.integers(16)
        hashed.append(np.bincount(home[chosen], minlength=devices).max())
        drawn.append(np.bincount(rng.integers(0, devices, 8), minlength=devices).max())
    assert np.mean(hashed) <= np.mean(drawn) * 1.01


@pytest.mark.parametrize(
    ("counts", "devices", "homes"),
    [
        ([6] * 4, 2, [0, 0, 1, 1]),
        ([6] * 5, 2, [0, 0, 1, 1, 1]),  # the middle of the third layer is the middle of all
        ([6] * 5, 3, [0, 0, 1, 2, 2]),
        ([2, 2, 2, 6], 2, [0, 0, 0, 1]),  # by experts, not by layers
        ([9, 1, 1], 3, [0, 1, 2]),  # each device has a layer
        ([1, 1, 9], 3, [0, 1, 2]),
    ],
)
def test_whole_layers_by_hand(counts, devices, homes):
    offsets = np.concatenate([[0], np.cumsum(counts)]).tolist()
    active = range(10, 10 + devices)
    assert home_devices(offsets, active, "layers").tolist() == [
        10 + home for home, count in zip(homes, counts, strict=True) for _ in range(count)
    ]


@given(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(1, 14), st.data())
def test_whole_layers_are_consecutive_and_every_device_has_some(counts, devices, data):
    offsets = np.concatenate([[0], np.cumsum(counts)]).tolist()
    if devices > len(counts):
        with pytest.raises(UsageError, match=f"can be placed on 1 to {len(counts)} devices"):
            home_devices(offsets, range(devices), "layers")
        return
    every = Pieces.unsplit(offsets, [1] * len(counts), devices=devices, placement="layers")
    homes = every.home_device[offsets[:-1]]
    assert every.home_device.tolist() == np.repeat(homes, counts).tolist()
    assert {*np.diff(homes).tolist()} <= {0, 1}
    assert (homes[0], homes[-1]) == (0, devices - 1)
    load = np.bincount(every.home_device).tolist()
    if len({*counts}) == 1:
        assert max(load) - min(load) <= counts[0]
    each = data.draw(st.integers(1, 99))  # slots in the memory of each device
    slots = min(int(each * every.equal_devices), sum(load))
    if min(load) * slots >= sum(load):  # each device gets one
        shares = every.slots_per_device(slots)
        assert max(shares) <= each
        assert shares == load or slots < sum(load)
    alone = every.on_devices([0])
    assert (alone.home_device == 0).all()
    assert (alone.equal_devices, alone.on_devices(range(devices)).placement) == (1, "layers")


def test_slots_of_whole_layers_belong_to_these_layers():
    every = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=2, placement="layers")  # homes 0 1 1
    assert every.slots_per_device(9) == [3, 6]
    assert every.equal_devices == Fraction(3, 2)
    assert group_sizes(every, 9, "shared") == [3, 6]
    assert group_sizes(every, 9, "per-layer") == [3, 0, 0, 0, 3, 3]
    assert group_sizes(every, 9, (1.0, 2.0, 1.0)) == [3, 0, 0, 0, 4, 2]
    assert least_capacity(every, "per-layer") == 3
    assert least_capacity(every.on_devices([0]), "per-layer") == 3
    assert [every.layers_beside(layer) for layer in range(3)] == [1, 2, 2]
    spread = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=2)
    assert least_capacity(spread, "per-layer") == 6
    assert [spread.layers_beside(layer) for layer in range(3)] == [3, 3, 3]


def test_a_prompt_fills_the_slots_of_its_layer_s_device():
    every = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=2, placement="layers")
    s = Scheduler(every, 9, policy("lru"))
    assert [s.placement.prompt_share(layer) for layer in range(3)] == [3, 3, 3]
    served = s.placement.cache.serve(ids(0, 1, 2, 3, 4), 0, fill=3)
    assert (served.slots >= 0).sum() == 3


@given(st.integers(1, 300), st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_slots_are_shared_in_proportion(capacity, experts_per_device):
    try:
        slot_counts = slots_per_device(capacity, experts_per_device)
    except BudgetError:
        assert len(experts_per_device) > 1
        assert min(capacity * n / sum(experts_per_device) for n in experts_per_device) < 1
        return
    assert sum(slot_counts) == capacity
    assert all(
        abs(f - capacity * n / sum(experts_per_device)) < 1
        for f, n in zip(slot_counts, experts_per_device, strict=True)
    )
    assert slots_per_device(sum(experts_per_device), experts_per_device) == experts_per_device


def test_a_policy_that_needs_the_trace_works_on_one_device_only():
    with pytest.raises(
        UsageError, match="opt must know the whole trace, which works on one device only"
    ):
        Cache(pieces(devices=2), 6, policy("opt"))


def test_a_device_without_a_slot_is_refused():
    with pytest.raises(BudgetError, match="3 devices need at least one slot each, but there are 2"):
        Cache(pieces(devices=3), 2, policy("lru"))


def test_every_device_has_a_last_link_of_its_own():
    assert spread((2, 1), 1) == (2, 1)
    s = Scheduler(pieces(devices=2), 12, policy("lru"), lanes=(1, 2))
    assert s.transfers.queue.lanes == (1, 2, 2)
    assert s.transfers.queue.paths == [(0, 1), (0, 2)]
    shared_cache = Scheduler(pieces(devices=3), 12, policy("lru"), lanes=2)
    assert shared_cache.transfers.queue.lanes == (2, 2, 2)
    assert shared_cache.view.sources == {0, 1, 2}


def test_every_device_has_its_own_link_and_its_own_groups():
    s = Scheduler(pieces(devices=2), 4, policy("lru"), lanes=1)
    actions = s.on(Routed(0, 0, ids(0, 1, 2, 3)))  # homes: 0 1 0 1
    assert sorted((a.piece, a.link, a.slot % 2) for a in actions) == [(0, 0, 0), (1, 1, 1)]
    (more, group) = s.on(Landed(0, 1, 1))
    assert (group.experts.tolist(), group.device, more.piece, more.link) == ([1], 1, 3, 1)
    (more, group) = s.on(Landed(0, 0, 0))  # while the other device computes its group
    assert (group.experts.tolist(), group.device, more.piece, more.link) == ([0], 0, 2, 0)
    assert s.on(Landed(0, 3, 1)) == []  # its device is computing
    (group,) = [a for a in s.on(Computed(1)) if isinstance(a, ComputeGroup)]
    assert (group.experts.tolist(), group.device) == ([3], 1)
    with pytest.raises(RuntimeError, match="device 1 computes no expert group"):
        Scheduler(pieces(devices=2), 4, policy("lru")).on(Computed(1))


def test_a_step_too_large_for_one_device_reuses_only_its_slots():
    s = Scheduler(pieces(devices=2), 4, policy("lru"), lanes=1)
    driver = RandomDriver(s, random.Random(3), 0.0)
    driver.run(0, 0, ids(0, 1, 2, 4), cancel=False, prefill=False)  # three on device 0
    assert sorted(driver.computed) == [0, 1, 2, 4]
    assert len(s.residents()) == 3


@pytest.mark.parametrize("name", sorted(POLICIES))
@plain_policies()
def test_every_policy_evicts_on_the_device_that_needs_the_slot(name):
    chosen = policy(name)
    if chosen.needs_trace:
        pytest.skip("decides by the whole trace")
    every, rng = pieces(devices=2), np.random.default_rng(5)
    cache = Cache(every, 6, chosen)
    for clock in range(60):
        layer = clock % 2
        requested = np.sort(rng.permutation(6)[:2] + 6 * layer)
        served = cache.serve(
            requested, clock, rows=np.ones(2, np.int64), weights=np.ones(2, np.float32)
        )
        for piece, slot, evicted in zip(requested, served.slots, served.evicted, strict=True):
            if slot >= 0:
                assert (slot >= 3) == every.home_device[piece]
            if evicted >= 0:
                assert every.home_device[evicted] == every.home_device[piece]
        cache.release(requested)
    homes_of_residents = np.bincount(every.home_device[cache.residents()], minlength=2)
    assert homes_of_residents.max() <= 3


def test_a_resize_moves_nothing_to_another_device():
    s = Scheduler(pieces(devices=2), 12, policy("lru"), lanes=2)
    driver, rng = RandomDriver(s, random.Random(1), 0.0), np.random.default_rng(0)
    for number, capacity in enumerate((12, 5, 9, 2, 12, 3)):
        driver.send(Resized(capacity))
        chosen = np.sort(rng.permutation(6)[:4]) + 6 * (number % 2)
        driver.run(number, number % 2, chosen.astype(np.int64), cancel=False, prefill=False)
        for piece in s.residents().tolist():
            slot = s.placement.slot(piece)
            assert slot % 2 == s.pieces.home_device[piece]
            assert slot // 2 < s.pieces.slots_per_device(capacity)[slot % 2]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        *((n, "experts") for n in sorted(POLICIES) if not policy(n).needs_trace),
        *((n, "layers") for n in ("lru", "moe-infinity", "s3fifo")),
    ],
)
def test_devices_come_and_go_under_every_policy(name, placement):
    every = Pieces.unsplit([0, 6, 12, 18], [1] * 3, devices=3, active=(0, 1), placement=placement)
    assert every.active_devices == [0, 1]
    s = Scheduler(every, 6, policy(name), lanes=2)
    driver, rng = RandomDriver(s, random.Random(1), 0.0), np.random.default_rng(0)
    changes = [(6, None), (9, (0, 1, 2)), (3, (0,)), (4, (0, 2)), (8, (0, 2)), (12, (0, 1, 2))]
    for number, (capacity, devices) in enumerate(changes * 2):
        home = every.home_device.copy()
        before = set(s.residents().tolist())
        driver.send(Resized(capacity, devices=devices))
        if devices is not None:
            assert every.active_devices == list(devices)
            assert every.home_device.tolist() == s.placement.home_device
            kept = {piece for piece in before if every.home_device[piece] == home[piece]}
            assert set(s.residents().tolist()) <= kept
        chosen = np.sort(rng.permutation(6)[:2]) + 6 * (number % 3)
        driver.run(number, number % 3, chosen.astype(np.int64), cancel=False, prefill=False)
        assert sorted(driver.computed) == chosen.tolist()
        each = every.slots_per_device(capacity)
        assert [n > 0 for n in each] == [d in every.active_devices for d in range(3)]
        for piece in s.residents().tolist():
            slot = s.placement.slot(piece)
            assert slot % 3 == every.home_device[piece]
            assert slot // 3 < each[slot % 3]


def test_devices_that_the_memory_does_not_have_are_refused():
    s = Scheduler(pieces(devices=2), 12, policy("lru"), lanes=2)
    with pytest.raises(UsageError, match="devices 0, 2: the cache was made for 2"):
        s.view.check_capacity(12, devices=(0, 2))
    with pytest.raises(BudgetError, match="2 devices need at least one slot each"):
        s.view.check_capacity(1, devices=(0, 1))


def test_devices_with_a_slot_for_every_expert_evict_nothing():
    s = Scheduler(pieces(devices=2), 12, policy("lru"), lanes=2)
    driver = RandomDriver(s, random.Random(1), 0.0)
    for layer in (0, 1):
        driver.run(layer, layer, ids(*range(6 * layer, 6 * layer + 6)), cancel=False, prefill=False)
    slots = s.resident_steps.path.step(ids(1, 2))
    assert slots is not None
    assert [driver.memory[int(slot)] for slot in slots] == [1, 2]
