from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.events import (
    Cancelled,
    Computed,
    ComputeGroup,
    Failed,
    Finish,
    Idle,
    Landed,
    Move,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, RandomDriver, ids, pieces
from tests.core.reference import ReferenceCache
from tests.core.strategies import steps


def scheduler(capacity: int, lanes: int = 2, chunks: int = 1, scope: str = "shared") -> Scheduler:
    return Scheduler(pieces(chunks), capacity, policy("lru"), lanes=lanes, scope=scope)


def computed_in(actions: list) -> list[list[int]]:
    return [a.experts.tolist() for a in actions if isinstance(a, ComputeGroup)]


def test_residents_are_computed_first_and_arrivals_as_they_land():
    s = scheduler(6, lanes=1)
    s.on(Routed(0, 0, ids(1)))
    s.on(Landed(0, 1))
    assert s.on(Computed()) == [Finish()]

    actions = s.on(Routed(0, 1, ids(7)))
    assert [type(a) for a in actions] == [StartChunk]
    s.on(Landed(0, 7))
    s.on(Computed())

    actions = s.on(Routed(1, 0, ids(0, 1, 2)))
    assert isinstance(actions[0], StartChunk)  # the transfer starts before the group
    assert computed_in(actions) == [[1]]
    assert computed_in(s.on(Landed(0, 0))) == []  # a group is being computed
    assert computed_in(s.on(Computed())) == [[0]]
    assert computed_in(s.on(Landed(0, 2))) == []
    assert computed_in(s.on(Computed())) == [[2]]
    assert s.on(Computed()) == [Finish()]
    assert (s.counts.requests, s.counts.hits) == (5, 1)


def test_a_slot_is_not_overwritten_before_its_expert_is_computed():
    s = scheduler(1)
    actions = s.on(Routed(0, 0, ids(3, 4)))
    assert [a.piece for a in actions] == [3]
    assert computed_in(s.on(Landed(actions[0].lane, 3))) == [[3]]
    actions = s.on(Computed())
    assert [(a.piece, a.slot) for a in actions] == [(4, 0)]


def test_a_failure_ends_the_step_and_no_incomplete_expert_stays():
    s = scheduler(6, lanes=2, chunks=2)
    first, second = s.on(Routed(0, 0, ids(1, 2)))
    assert (first.piece, second.piece) == (1, 1)
    assert s.on(Failed(first.lane, 1)) == []  # the other chunk is still moving
    assert s.on(Landed(second.lane, 1)) == [Finish(failed=1)]
    assert s.residents().tolist() == []
    assert len(s.transfers.entries) == 0


def test_a_cancelled_step_keeps_what_has_arrived():
    s = scheduler(6, lanes=1)
    s.on(Routed(0, 0, ids(1, 2)))
    s.on(Landed(0, 1))
    assert s.on(Cancelled()) == []
    assert s.on(Landed(0, 2)) == [Finish()]
    assert s.residents().tolist() == [1, 2]


def test_a_resize_waits_for_the_end_of_the_step():
    s = scheduler(4, lanes=4)
    for action in s.on(Routed(0, 0, ids(0, 1, 2, 3))):
        s.on(Landed(action.lane, action.piece))
    assert s.on(Resized(2)) == []
    while not isinstance((actions := s.on(Computed()))[-1], Finish):
        pass
    assert actions[-2] == Trim(2)
    assert s.residents().tolist() == [2, 3]
    assert all(isinstance(a, Move) for a in actions[:-2])


def test_two_steps_at_a_time_are_refused():
    s = scheduler(2)
    s.on(Routed(0, 0, ids(0)))
    with pytest.raises(RuntimeError, match="the step must finish first"):
        s.on(Routed(0, 0, ids(1)))


@given(
    steps=steps(LAYERS, EXPERTS),
    capacity=st.integers(2, 13),
    lanes=st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2)]),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer"]),
    ahead=st.sampled_from([0, 0, 1, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    places=st.sampled_from([(1, "experts")] * 2 + [(2, "experts"), (3, "experts"), (2, "layers")]),
    named=st.sampled_from(["lru", "next-use", "moe-infinity", "arc"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_computes_every_expert_once_from_its_own_bytes(
    steps, capacity, lanes, chunks, scope, ahead, failing, places, named, seed
):
    devices, placement = places
    groups = devices * (LAYERS if scope == "per-layer" else 1)
    every, capacity = pieces(chunks, devices, placement), max(groups, capacity)
    s = Scheduler(every, capacity, policy(named), lanes=lanes, scope=scope, ahead=ahead)
    driver = RandomDriver(s, random.Random(seed), failing)
    reference = ReferenceCache(OFFSETS, [s.placement.cache.capacity], "lru")
    clean, hits = scope == "shared" and devices == 1 and named == "lru", 0
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        clean &= s.placement.buffer.size == 0
        driver.run(number, layer, experts, cancel, prefill)
        if cancel or driver.finish.failed >= 0:
            clean = False
            assert len(driver.computed) == len(set(driver.computed))
        else:
            assert sorted(driver.computed) == experts.tolist()
        if chance == 9:
            driver.send(Resized(groups + seed % 12, number % 4))
            clean = False
        if chance in (7, 8):
            before = {*s.residents().tolist()}
            evicts = s.placement.buffer.size > 0 or s.placement.resizing  # for predicted experts
            driver.send(Idle(np.random.default_rng(seed + number).permutation(OFFSETS[-1])))
            for _ in range(min(len(driver.moving), seed % 9)):
                driver.land()
            assert evicts or before <= {*s.residents().tolist()}
            clean = False
        for piece in s.residents().tolist():  # what counts as resident is there, whole
            assert driver.memory[s.placement.slot(piece)] == piece
        assert not s.placement.cache.state.pinned.any()
        if clean:
            hits += sum(hit for hit, _ in reference.step(experts.tolist()))
            assert s.counts.hits == hits
    while driver.moving:
        driver.land()
    assert len(s.transfers.entries) == 0
    assert not s.placement.resizing
    places = [
        n * devices + d
        for d, share in enumerate(every.slots_per_device(s.capacity))
        for n in range(share)
    ]
    assert sorted(s.placement.tier_slots) == sorted(places)
    borrowed = len(s.placement.buffer.borrowed)
    assert (
        borrowed + int(s.placement.cache.state.free_count.sum()) + s.residents().size == s.capacity
    )
    c = s.counts
    over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed + c.idle
    assert over + borrowed == c.prefetches
