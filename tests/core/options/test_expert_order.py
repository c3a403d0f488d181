from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import greenroom
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Computed, ComputeGroup, Landed, Predicted, Routed, StartChunk
from greenroom.core.options.expert_order import ExpertOrderConfig
from greenroom.core.options.rules.expert_order import InOrder
from greenroom.core.pieces import Pieces, Split
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UnknownName, UsageError
from greenroom.policies import policy
from greenroom.sim.study import Cell, Study
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, RandomDriver, groups, ids, pieces
from tests.core.strategies import steps as steps_of
from tests.options import needs_option
from tests.sim.small import trace as small_trace


def scheduler(on_access: bool, capacity: int = 6, *, cached: bool = False, **settings) -> Scheduler:
    options = [InOrder(on_access, cached)]
    return Scheduler(pieces(), capacity, policy("lru"), lanes=1, options=options, **settings)


def fill(s: Scheduler, *experts: int) -> None:
    """Make experts of layer 0 resident, in this order of use."""
    for number, expert in enumerate(experts):
        actions = s.on(Routed(number, 0, ids(expert)))
        while actions:
            action = actions.pop(0)
            if isinstance(action, StartChunk):
                actions += s.on(Landed(action.lane, action.piece, action.link))
            elif isinstance(action, ComputeGroup):
                actions += s.on(Computed(0))


def moved(actions) -> list[int]:
    return [a.piece for a in actions if isinstance(a, StartChunk)]


def test_a_resident_expert_waits_for_a_missing_one_before_it():
    """1, 4 and 5 are resident, 2 is not (ProMoE's figure 10): 1, then 2, 4 and 5."""
    s = scheduler(on_access=False)
    fill(s, 1, 4, 5)
    actions = s.on(Routed(9, 0, ids(1, 2, 4, 5)))
    assert (moved(actions), groups(actions)) == ([2], [([1], 0)])
    assert groups(s.on(Computed(0))) == []
    assert groups(s.on(Landed(0, 2, 0))) == [([2, 4, 5], 0)]


def test_on_access_a_missing_expert_is_read_when_its_turn_comes():
    s = scheduler(on_access=True)
    fill(s, 1, 4)
    actions = s.on(Routed(9, 0, ids(1, 2, 3, 4)))
    assert (moved(actions), groups(actions)) == ([], [([1], 0)])
    assert moved(s.on(Computed(0))) == [2]
    assert groups(s.on(Landed(0, 2, 0))) == [([2], 0)]
    assert moved(s.on(Computed(0))) == [3]
    assert groups(s.on(Landed(0, 3, 0))) == [([3, 4], 0)]


@pytest.mark.parametrize("on_access", [False, True])
def test_a_prompt_thrashes_the_cache(on_access):
    """0 evicts 4, the least recently used, which the same step needs; 4 evicts 5, and so on."""
    s = scheduler(on_access, capacity=2)
    fill(s, 4, 5)
    s.on(Routed(9, 0, ids(0, 4, 5), prefill=True))
    assert s.counts.hits == 0


def test_cached_experts_of_a_prompt_are_computed_before_others_replace_them():
    """4 and 5 are computed first; 0 and 1 then replace 2 and 3, and stay."""
    s = scheduler(on_access=False, capacity=4, cached=True)
    fill(s, 2, 3, 4, 5)
    actions = s.on(Routed(9, 0, ids(0, 1, 4, 5), prefill=True))
    assert (moved(actions), groups(actions)) == ([0], [([4, 5], 0)])
    assert s.counts.hits == 2
    assert s.residents().tolist() == [0, 1, 4, 5]


def test_cached_experts_reuse_the_slots_of_those_computed_before():
    s = scheduler(on_access=False, capacity=2, cached=True)
    fill(s, 4, 5)
    s.on(Routed(9, 0, ids(0, 1, 4, 5), prefill=True))
    assert s.counts.hits == 2
    assert s.residents().tolist() == [0, 1]


def test_by_default_a_prompt_keeps_its_residents():
    s = Scheduler(pieces(), 4, policy("lru"), lanes=1, ahead=1)
    fill(s, 2, 3, 4, 5)
    s.on(Routed(9, 0, ids(0, 1, 2, 3, 4, 5), prefill=True))
    assert s.counts.hits == 4


@pytest.mark.parametrize("on_access", [False, True])
def test_a_wrong_prefetch_is_dropped_unless_misses_wait_for_access(on_access):
    s = scheduler(on_access, capacity=8, ahead=2)
    assert moved(s.on(Predicted(0, ids(3)))) == [3]
    s.on(Routed(0, 0, ids(1)))
    assert s.counts.dropped == (not on_access)


@given(
    steps=steps_of(LAYERS, EXPERTS),
    capacity=st.integers(2, 13),
    lanes=st.sampled_from([(1,), (3,), (1, 1), (2, 1)]),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer"]),
    ahead=st.sampled_from([0, 1, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    order=st.sampled_from([(False, False), (True, False), (False, True)]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_every_expert_is_computed_once_in_order_from_its_own_bytes(
    steps, capacity, lanes, chunks, scope, ahead, failing, order, devices, seed
):
    options, every = [InOrder(*order)], pieces(chunks, devices)
    capacity += 2 * (devices - 1)  # a slot for each layer of each device
    s = Scheduler(
        every, capacity, policy("lru"), lanes=lanes, scope=scope, ahead=ahead,
        options=options,
    )  # fmt: skip
    driver = RandomDriver(s, random.Random(seed), failing)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel = chance == 0
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        in_order = not order[1] and s.placement.leaves_slots(experts)  # else as by default
        driver.run(number, layer, experts, cancel, chance in (1, 2, 3))
        if not cancel and driver.finish.failed < 0:
            assert sorted(driver.computed) == experts.tolist()
            for device in range(devices):
                mine = [e for e in driver.computed if every.home_device[e] == device]
                assert not in_order or mine == sorted(mine)
        for piece in s.residents().tolist():
            assert driver.memory[s.placement.slot(piece)] == piece
        assert not s.placement.cache.state.pinned.any()
    while driver.moving:
        driver.land()
    borrowed = len(s.placement.buffer.borrowed)
    free = int(s.placement.cache.state.free_count.sum())
    assert borrowed + free + s.residents().size == s.capacity
    c = s.counts
    over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed
    assert over + borrowed == c.prefetches


def test_a_simulation_waits_for_each_miss_on_access():
    """Without prefetching every miss is waited for: the stall is the time of all transfers."""
    trace = small_trace([[-5, 1, 1, 1, 1, 1, 1]], seed=3)
    costs = Costs((Link(1e6, lanes=1),), Work.constant(1e-4), Work.constant(1e-3))
    times = {}
    for order in ("resident", "id", "access"):
        study = Study.of(
            trace, "runtime", costs=costs, expert_bytes=1000,
            config=SchedulerConfig(expert_order=order),
        )  # fmt: skip
        times[order] = study.run(Cell("lru", 12))
    row = times["access"]
    assert row["stall_s"] == pytest.approx(row["misses"] * 1e-3)
    assert times["resident"]["stall_s"] <= times["id"]["stall_s"] < row["stall_s"]


def test_what_excludes_another_order_is_named():
    assert ExpertOrderConfig(expert_order="id").changes_times()
    assert SchedulerConfig().options(pieces()) == []
    with pytest.raises(
        UnknownName, match="unknown expert_order 'big': choose one of resident, cached"
    ):
        SchedulerConfig(expert_order="big")
    config = SchedulerConfig(expert_order="id")
    split = Split.of(100, 0.5, LAYERS, 4)
    every = Pieces.with_split(OFFSETS, split, [1] * 2 * OFFSETS[-1])
    with pytest.raises(UsageError, match="--expert-order id works only with whole experts"):
        config.options(every)


@needs_option("co_compute")
def test_two_processors_exclude_another_order():
    with pytest.raises(UsageError, match="--expert-order id and --co-compute auto exclude"):
        SchedulerConfig(expert_order="id", co_compute="auto")


@needs_option("skip_below")
def test_approximation_excludes_another_order():
    with pytest.raises(UsageError, match="--expert-order access and an option that approximates"):
        SchedulerConfig(expert_order="access", skip_below=0.1)


def test_the_demo_model_says_the_same():
    said = []
    for order in ("resident", "cached", "id", "access"):
        model, tokenizer = greenroom.load("demo", cache="25%", policy="lru", expert_order=order)
        try:
            prompt = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
            said.append(model.generate(prompt, max_new_tokens=8, do_sample=False).tolist())
            assert model.greenroom.stats()["expert_requests"] > 0
        finally:
            model.greenroom.detach()
    assert said[0] == said[1] == said[2] == said[3]
    assert np.size(said[0]) > 8
