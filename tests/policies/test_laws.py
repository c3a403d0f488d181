"""Laws that every policy in the table keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.errors import UsageError
from greenroom.policies import POLICIES, policy
from greenroom.sim.replay import replay
from tests.policies.reference import Step
from tests.policies.streams import LAYERS, OFFSETS, as_stream, steps

pytestmark = pytest.mark.usefixtures("uncompiled")
ALL = OFFSETS[-1]
PIECES = Pieces.unsplit(OFFSETS, [1] * LAYERS)
INSERTING = [name for name, p in POLICIES.items() if p.preload is None]  # demand paging
STACK = ["lru", "opt"]


def misses(name: str, all_steps: list[Step], capacity: int, pin: str = "none", **how: str) -> int:
    return replay(as_stream(all_steps), OFFSETS, capacity, policy(name), pin=pin, **how).misses


@pytest.mark.parametrize("name", INSERTING)
@given(steps=steps(), capacity=st.integers(1, ALL))
@settings(max_examples=50, deadline=None)
def test_none_misses_less_than_opt_without_pinning(name, steps, capacity):
    floor = misses("opt", steps, capacity)
    assert misses(name, steps, capacity) >= floor
    assert misses(name, steps, capacity, "step") >= floor
    if capacity >= LAYERS:
        assert misses(name, steps, capacity, scope="per-layer") >= floor


@given(steps=steps(), capacity=st.integers(1, ALL - 1))
@settings(max_examples=50, deadline=None)
def test_static_with_one_scratch_slot_misses_no_less_than_opt(steps, capacity):
    """Pinned pieces are inserted once; the others need a scratch slot for a moment."""
    inserted = min(capacity, len({p for step in steps for p in step.pieces}))
    assert misses("static", steps, capacity) + inserted >= misses("opt", steps, capacity + 1)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps(), capacity=st.integers(1, ALL))
@settings(max_examples=40, deadline=None)
def test_no_step_evicts_its_own_pieces(name, steps, capacity):
    cache = Cache(PIECES, capacity, policy(name), trace=as_stream(steps))
    for step in steps:
        pieces = np.array(step.pieces, np.int64)
        served = cache.serve(
            pieces, step.clock, token=step.token, request=step.prompt, prefill=step.prefill
        )
        assert len(cache.residents()) <= capacity
        if pieces.size <= capacity:
            assert not set(served.evicted.tolist()) & set(step.pieces)
            cache.release(pieces)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps())
@settings(max_examples=30, deadline=None)
def test_with_room_for_all_each_piece_is_missed_once(name, steps):
    distinct = len({p for step in steps for p in step.pieces})
    expected = distinct if name in INSERTING else 0
    assert misses(name, steps, ALL) == misses(name, steps, ALL, "step") == expected


@pytest.mark.parametrize("name", STACK)
@given(steps=steps(), capacity=st.integers(1, ALL - 1))
@settings(max_examples=80, deadline=None)
def test_a_larger_cache_of_a_stack_algorithm_holds_all_that_a_smaller_one_does(
    name, steps, capacity
):
    trace = as_stream(steps)
    small, large = (Cache(PIECES, c, policy(name), trace=trace) for c in (capacity, capacity + 1))
    for step in steps:
        for cache in (small, large):
            pieces = np.array(step.pieces, np.int64)
            cache.serve(
                pieces,
                step.clock,
                "none",
                token=step.token,
                request=step.prompt,
                prefill=step.prefill,
            )
        assert set(small.residents()) <= set(large.residents())


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_needs_the_future_refuses_a_run(name):
    if POLICIES[name].needs_trace:
        with pytest.raises(UsageError, match=f"policy {name} must know the whole trace"):
            Cache(PIECES, 3, policy(name))
    else:
        Cache(PIECES, 3, policy(name)).serve(np.array([0], np.int64), 0)


@pytest.mark.parametrize("name", INSERTING)
@given(steps=steps(), capacities=st.lists(st.integers(LAYERS, ALL), min_size=2, max_size=4))
@settings(max_examples=15, deadline=None)
def test_removed_pieces_and_resized_caches_keep_the_policy_consistent(name, steps, capacities):
    """Transfers fail and budgets change: what is resident is what the policy thinks it is."""
    trace = as_stream(steps)
    cache = Cache(PIECES, capacities[0], policy(name), trace=trace)
    for i, step in enumerate(steps):
        pieces = np.array(step.pieces, np.int64)
        served = cache.serve(
            pieces, step.clock, token=step.token, request=step.prompt, prefill=step.prefill
        )
        if served.pinned:
            cache.release(pieces)
        if i % 3 == 0:
            cache.remove(step.pieces[0], step.clock)
        if i % 4 == 0:
            cache.resize(capacities[i // 4 % len(capacities)])
        residents = cache.residents()
        assert len(residents) <= cache.capacity
        assert (cache.state.slot_of[residents] >= 0).all()
        assert int(cache.state.free_count.sum()) == cache.capacity - len(residents)
