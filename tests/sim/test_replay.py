from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.errors import BudgetError, UnknownName, UsageError
from greenroom.policies import policy
from greenroom.sim.replay import replay
from tests.policies.reference import Step
from tests.policies.streams import OFFSETS, as_stream, steps, tokens

STREAM = as_stream(tokens(seed=3, count=12))


def test_counts_requests_and_misses():
    done = replay(STREAM, OFFSETS, 4, policy("lru"), detail=True)
    assert done.requests == STREAM.pieces.size == done.missed.size
    assert done.misses == int(done.missed.sum()) > 0
    assert done.miss_ratio == done.misses / done.requests
    assert replay(STREAM, OFFSETS, 4, policy("lru")).missed is None


def test_an_empty_stream_misses_nothing():
    done = replay(as_stream([]), OFFSETS, 4, policy("lru"))
    assert (done.requests, done.misses, done.miss_ratio) == (0, 0, 0.0)


@pytest.mark.parametrize("name", ["lru", "moe-infinity", "random"])
@given(steps=steps(), capacity=st.integers(1, OFFSETS[-1]))
@settings(max_examples=40, deadline=None)
def test_reset_replays_every_request_separately(name, steps, capacity):
    separate_misses = 0
    for prompt in {step.prompt for step in steps}:
        part = as_stream([step for step in steps if step.prompt == prompt])
        separate_misses += replay(part, OFFSETS, capacity, policy(name)).misses
    assert (
        replay(as_stream(steps), OFFSETS, capacity, policy(name), reset=True).misses
        == separate_misses
    )


def test_a_step_larger_than_the_cache_is_not_protected():
    """2 evicts 0, of its own step. The next step fits, and 2 makes room for 0."""
    stream = as_stream([Step([0, 1, 2], 0, 0, 0, 0, [], []), Step([0, 1], 3, 1, 0, 0, [], [])])
    assert replay(stream, OFFSETS, 2, policy("lru")).misses == 4


def test_pinning_changes_which_expert_is_evicted():
    """LRU would evict 1, which this step asks for after 2; pinned, 0 goes."""
    first, second = Step([1, 0], 0, 0, 0, 0, [], []), Step([2, 1], 3, 1, 0, 0, [], [])
    stream = as_stream([first, second])
    assert replay(stream, OFFSETS, 2, policy("lru"), pin="none").misses == 4
    assert replay(stream, OFFSETS, 2, policy("lru"), pin="step").misses == 3


@pytest.mark.parametrize("capacity", [0, -1, 13])
def test_an_impossible_capacity_is_an_error(capacity):
    with pytest.raises(UsageError, match=f"is {capacity}: it must be from 1 to 12"):
        replay(STREAM, OFFSETS, capacity, policy("lru"))


def test_unknown_names_are_errors():
    with pytest.raises(UnknownName, match="unknown scope 'global': choose one of shared, per-lay"):
        replay(STREAM, OFFSETS, 4, policy("lru"), scope="global")
    with pytest.raises(UnknownName, match="unknown pin 'all': choose one of step, none"):
        replay(STREAM, OFFSETS, 4, policy("lru"), pin="all")
    with pytest.raises(BudgetError, match="each of 3 layers, got 2"):
        replay(STREAM, OFFSETS, 2, policy("lru"), scope="per-layer")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("best", "part of policy static must be all, first-half"),
        ("40-50", "part of policy static is '40-50', which has no step"),
        ("prefill", "part of policy static is 'prefill', which has no step"),
    ],
)
def test_an_unknown_part_of_the_trace_is_an_error(part, message):
    with pytest.raises(UsageError, match=message):
        replay(STREAM, OFFSETS, 4, policy(f"static:part={part}"))


def test_static_counts_on_the_part_that_is_named():
    """The first prompt asks for 0 and 1, the second for 2 and 3."""
    stream = as_stream([Step([p], 3 * i, i, i // 2, 0, [], []) for i, p in enumerate([0, 1, 2, 3])])
    for part, missed in (
        ("first-half", [False, False, True, True]),
        ("1-1", [True, True, False, False]),
        ("decode", [True, True, False, False]),  # equal counts: the later requests
    ):
        done = replay(stream, OFFSETS, 2, policy(f"static:part={part}"), detail=True)
        assert done.missed.tolist() == missed
