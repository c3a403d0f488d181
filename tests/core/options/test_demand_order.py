from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import greenroom
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import Finish, Routed, StartChunk
from greenroom.core.options.rules.demand_order import HottestFirst
from greenroom.core.pieces import Copies, Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.queue import TransferQueue, Urgency
from greenroom.errors import UnknownName
from greenroom.policies import policy
from greenroom.sim.study import Cell, Study
from tests.core.random_driver import (
    EXPERTS,
    LAYERS,
    OFFSETS,
    RandomDriver,
    carry_out,
    ids,
    pieces,
)
from tests.core.strategies import steps as steps_of
from tests.core.transfers.test_queue import drain
from tests.sim import small

N = OFFSETS[-1]


def rows(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def moved(s: Scheduler, event: Routed) -> list[int]:
    """The pieces of a step, in the order in which they are moved."""
    done = carry_out(s, s.on(event), transfers_first=True)
    assert any(isinstance(action, Finish) for action in done)
    return [action.piece for action in done if isinstance(action, StartChunk)]


def hottest(capacity: int, every: Pieces, *options, **settings) -> Scheduler:
    options = [*options, HottestFirst(every)]
    return Scheduler(every, capacity, policy("lru"), lanes=1, options=options, **settings)


def test_the_expert_with_most_tokens_is_moved_first():
    """2 and 4 have three tokens each, 0 has two, 1 one: of equal ones the lower id."""
    s = hottest(6, pieces())
    assert moved(s, Routed(0, 0, ids(0, 1, 2, 4), rows=rows(2, 1, 3, 3))) == [2, 4, 0, 1]
    assert moved(s, Routed(0, 1, ids(6, 7))) == [6, 7]  # unknown: one token each


def test_without_the_option_experts_are_moved_by_id():
    s = Scheduler(pieces(), 6, policy("lru"), lanes=1)
    assert moved(s, Routed(0, 0, ids(0, 1, 2, 4), rows=rows(2, 1, 3, 3))) == [0, 1, 2, 4]


def hottest_with_copies(nested: bool) -> Scheduler:
    """Experts below a tail weight of 0.4 come from their copies."""
    precision = pytest.importorskip("greenroom.core.options.rules.precision").precision
    every = Pieces.with_copies(OFFSETS, Copies.of(100, 0.5, LAYERS, 4, nested=nested))
    return hottest(8, every, precision(Approximation(low=0.4), every))


@pytest.mark.parametrize("nested", [False, True])
def test_low_planes_are_moved_before_exact_experts(nested):
    """0 and 3 are exact, 1 and 2 come from their copies. 2 is hotter than 1, 3 hotter than 0."""
    s = hottest_with_copies(nested)
    weights = np.array([1, 0.1, 0.1, 1], np.float32)
    event = Routed(0, 0, ids(0, 1, 2, 3), rows=rows(1, 1, 2, 9), tail_weights=weights)
    assert moved(s, event) == [N + 2, N + 1, 3, 0]


def test_a_remainder_is_a_plane_of_its_own_behind_copies():
    """The copies of 1 and 2 are in memory. Now 1 is exact: its remainder is behind 3's copy."""
    s = hottest_with_copies(nested=True)
    low = np.array([0.1, 0.1], np.float32)
    assert moved(s, Routed(0, 0, ids(1, 2), tail_weights=low)) == [N + 1, N + 2]
    weights = np.array([1, 1, 0.1], np.float32)
    event = Routed(1, 0, ids(0, 1, 3), rows=rows(5, 9, 1), tail_weights=weights)
    assert moved(s, event) == [N + 3, 2 * N + 1, 0]


def test_demands_that_have_begun_stay_in_front():
    queue = TransferQueue([1])
    queue.add(1, 0, 2)
    (first,) = queue.start()
    queue.add(2, 1, 1)
    queue.add(3, 2, 1)
    queue.add(4, 3, 1, Urgency.PREFETCH)
    queue.reorder(lambda waiting: sorted(waiting, reverse=True))
    queue.land(0, first.lane)
    assert drain(queue) == [(1, 1), (3, 0), (2, 0), (4, 0)]


@given(
    steps=steps_of(LAYERS, EXPERTS),
    capacity=st.integers(3, 13),
    lanes=st.sampled_from([(1,), (3,), (1, 1), (2, 1)]),
    chunks=st.integers(1, 3),
    ahead=st.sampled_from([0, 2]),
    devices=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_expert_is_computed_once_in_any_order(
    steps, capacity, lanes, chunks, ahead, devices, seed
):
    every = pieces(chunks, devices)
    s = Scheduler(
        every, capacity, policy("lru"), lanes=lanes, ahead=ahead, options=[HottestFirst(every)]
    )
    driver = RandomDriver(s, random.Random(seed), 0.0)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        driver.run(number, layer, experts, False, chance in (1, 2))
        assert sorted(driver.computed) == experts.tolist()


def test_a_simulation_without_prefetching_has_the_order_too():
    trace = small.trace([[-6, 1, 1]], seed=2)
    work = Work(((1, 1e-3), (6, 6e-3)))
    costs, seconds = Costs((Link(1e6, lanes=1),), work, Work.constant(1e-3)), {}
    for order in ("id", "hottest"):
        config = SchedulerConfig(demand_order=order)
        study = Study.of(trace, "runtime", costs=costs, expert_bytes=1000, config=config)
        assert study.needs_events == (order == "hottest")
        seconds[order] = study.run(Cell("lru", 16))["ttft_s"]
    assert seconds["hottest"] < seconds["id"]


def test_another_order_is_refused():
    with pytest.raises(UnknownName, match="unknown demand_order 'size': choose one of id, hottest"):
        SchedulerConfig(demand_order="size")


def test_the_demo_model_says_the_same(monkeypatch):
    tokens, plan, said = [], HottestFirst.plan, []

    def observed(self, event, *others):
        tokens.append(event.rows.max())
        return plan(self, event, *others)

    monkeypatch.setattr(HottestFirst, "plan", observed)
    for order in ("id", "hottest"):
        model, tokenizer = greenroom.load(
            "demo", cache="25%", prefetch="off", policy="lru", demand_order=order
        )
        try:
            assert (model.greenroom.driver.scheduler.option(HottestFirst) is None) == (
                order == "id"
            )
            prompt = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
            said.append(model.generate(prompt, max_new_tokens=12, do_sample=False).tolist())
        finally:
            model.greenroom.detach()
    assert said[0] == said[1]
    assert max(tokens) > 1  # in the prompt
