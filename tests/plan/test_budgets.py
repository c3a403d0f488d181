from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import BudgetError
from greenroom.plan.budgets import (
    METHODS,
    exposed_tables,
    marginal_slots,
    miss_tables,
    optimal_slots,
)
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import stream
from tests.sim import small

tables_of = st.lists(
    st.lists(st.integers(0, 50), min_size=2, max_size=5).map(
        lambda costs: np.array(sorted(costs, reverse=True), np.float64)
    ),
    min_size=1,
    max_size=3,
)


def cost(tables, slots):
    return sum(table[n] for table, n in zip(tables, slots, strict=True))


@given(tables_of, st.integers(0, 12))
@settings(deadline=None)
def test_optimal_is_the_best_of_all(tables, more):
    capacity = len(tables) + more
    slots_by_layer = optimal_slots(tables, capacity)
    assert sum(slots_by_layer) == min(capacity, sum(table.size - 1 for table in tables))
    every = product(*(range(1, table.size) for table in tables))
    least = min(cost(tables, each) for each in every if sum(each) == sum(slots_by_layer))
    assert cost(tables, slots_by_layer) == least


@given(tables_of, st.integers(0, 12))
@settings(deadline=None)
def test_marginal_is_optimal_where_gains_fall(tables, more):
    """Each further slot gains less: differences in descending order make such tables."""
    convex = [np.cumsum([t[0], *-np.sort(t[:-1] - t[1:])[::-1]]) for t in tables]
    capacity = len(tables) + more
    slots_by_layer = marginal_slots(convex, capacity)
    assert cost(convex, slots_by_layer) == pytest.approx(
        cost(convex, optimal_slots(convex, capacity))
    )
    assert sum(slots_by_layer) == min(capacity, sum(table.size - 1 for table in convex))


def test_marginal_looks_beyond_a_flat_part():
    """Layer 0 gains 30 with three slots more, nothing with one: 10 each, more than layer 1's 8."""
    tables = [np.array([99.0, 40, 40, 40, 10]), np.array([99.0, 30, 22, 14, 6])]
    assert marginal_slots(tables, 5) == [4, 1]
    assert optimal_slots(tables, 5) == [4, 1]


@pytest.mark.parametrize("method", METHODS.values())
def test_too_few_slots(method):
    with pytest.raises(
        BudgetError, match="2 layers need at least one cache slot each, but the capacity is 1"
    ):
        method([np.zeros(3), np.zeros(3)], 1)


@pytest.mark.parametrize("reset", [False, True])
def test_misses_are_those_of_a_replay(reset):
    trace = small.trace([[-3, 1, 1, 1], [1, 1]], seed=3)
    requests = stream(trace, "runtime")
    tables = miss_tables(requests, trace.offsets, reset=reset)
    for slots in ((1, 8), (3, 2), (8, 8)):
        done = replay(
            requests, trace.offsets, sum(slots), policy("lru"),
            scope=tuple(map(float, slots)), pin="none", reset=reset,
        )  # fmt: skip
        assert done.misses == cost(tables, slots)


def test_exposed_seconds_by_hand():
    """One layer, one expert a token: a b a. An expert loads in 4 s and computes in 1 s.

    One slot: three misses, 12 s. Two: two misses of 4 s, and a hit that hides nothing any more.
    """
    trace = small.of([[[0]], [[1]], [[0]]], [[1, 1, 1]])
    costs = Costs((Link(50.0), Link(25.0)), Work.constant(1.0), Work.constant(0.0))
    (table,) = exposed_tables(stream(trace, "runtime"), trace.offsets, costs, 100)
    assert table.tolist() == [12, 12, 8, 8, 8]


def test_a_step_hides_what_its_hits_compute():
    """Two experts a token: ab, then ac with two slots: c loads in 4 s while a computes 1 s."""
    trace = small.of([[[0, 1]], [[0, 2]]], [[1, 1]])
    costs = Costs((Link(25.0),), Work.constant(1.0), Work.constant(0.0))
    (table,) = exposed_tables(stream(trace, "runtime"), trace.offsets, costs, 100)
    assert table.tolist() == [16, 16, 11, 11, 11]
