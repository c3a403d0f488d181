from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.activity import Activity
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.pieces import Split
from greenroom.errors import BudgetError, UsageError
from greenroom.plan.configurator import (
    Division,
    LayerStatistics,
    TokenLatency,
    best_split,
    configure,
    expert_split,
    layer_statistics,
)

SECONDS = TokenLatency(attention=1.0, moe=1.0, head=0.0, load=4.0)


def unpredicted(*hits: float) -> LayerStatistics:
    """A layer with K = 1 and H(1), H(2), ..., of which nothing is predicted."""
    n = len(hits) + 1
    return LayerStatistics(1.0, np.array([0.0, *hits]), np.zeros(n), np.zeros((n, n)))


def test_equation_11_splits_where_only_the_bottom_fits_the_window():
    """H = 0.4, 1; P(1) = 0.8; PH(1, 1) = 0.25, PH(1, 2) = 1. V = 1, a whole expert loads in 4.

    C = 1: theta = 1, and the first predicted expert takes (1 - 0.25) * 4 = 3 > 2: m = 0.4.
    C = 2: theta = 0.5, it takes (1 - 0.5) * 4 = 2: m = 1 * 0.5 + 0.5 * 0.8 = 0.9.
    """
    both = np.array([[0, 0, 0], [0, 0.25, 1], [0, 0.75, 1.0]])
    layer = LayerStatistics(1.0, np.array([0, 0.4, 1]), np.array([0, 0.8, 0.2]), both)
    assert best_split(layer, 1.0, 2.0, SECONDS) == (2, 0.5, pytest.approx(0.9))
    # With a window of 3 it fits as a whole, and more than K cannot be there.
    assert best_split(layer, 1.0, 3.0, SECONDS) == (1, 1.0, pytest.approx(1.0))


def test_equations_5_to_7_lead_from_layer_to_layer():
    """m = 0.5: hidden 0.5 * 1, missed 0.5 * 4; what is left of moe is 1 - 0.5, and attention 1."""
    first, second = expert_split(
        [unpredicted(0.5, 1.0), unpredicted(1.0, 1.0)], [1.0, 1.0], SECONDS
    )
    assert (first.cached, first.ratio, first.loaded) == (1, 1.0, 0.5)
    assert (first.exposed, first.window) == (1.5, 1.5)
    assert (second.loaded, second.exposed, second.window) == (1.0, 0.0, 2.0)


def test_algorithm_1_step_by_step():
    """Two layers, H = (0.5, 1) and (1, 1); Ve = 2 and zeta = 0.125: a quarter expert at a time.

    V = (1, 1): T1 = (1.5, 0). V + 1/4: m = 0.625, T2 = (0.875, 0). V - 1/4: T3 = (2.125, 0.25).
    Layer 0 gains 0.625, layer 1 loses 0.25: V = (1.25, 0.75), T4 = (0.875, 0.25), which is less.
    From there layer 0 would gain 0.625 and layer 1 lose 1.25: rolled back.
    """
    layers = [unpredicted(0.5, 1.0), unpredicted(1.0, 1.0)]
    for budgets, exposed in (
        ([1, 1], [1.5, 0]),
        ([1.25, 1.25], [0.875, 0]),
        ([0.75, 0.75], [2.125, 0.25]),
        ([1.25, 0.75], [0.875, 0.25]),
        ([1.5, 0.5], [0.25, 1.5]),
    ):
        assert [each.exposed for each in expert_split(layers, budgets, SECONDS)] == exposed
    configuration = configure(layers, 2.0, SECONDS, zeta=0.125)
    assert [each.budget for each in configuration] == [1.25, 0.75]
    assert [(each.cached, each.ratio) for each in configuration] == [(2, 0.625), (1, 0.75)]


def test_algorithm_1_goes_on_from_the_present_budgets():
    """The layers of the test above, from V = (1.125, 0.875) instead of equal budgets.

    T1 = (1.1875, 0). Layer 0 would gain 0.625, layer 1 lose 0.875: T4 = (0.5625, 0.875), which is
    more. Only the proportion of the present budgets counts: a cache may have been resized.
    """
    layers = [unpredicted(0.5, 1.0), unpredicted(1.0, 1.0)]
    for budgets, exposed in (
        ([1.125, 0.875], [1.1875, 0]),
        ([1.375, 1.125], [0.5625, 0]),
        ([1.375, 0.625], [0.5625, 0.875]),
    ):
        assert [each.exposed for each in expert_split(layers, budgets, SECONDS)] == exposed
    for present in ([1.125, 0.875], [2.25, 1.75]):
        configuration = configure(layers, 2.0, SECONDS, zeta=0.125, present=present)
        assert [each.budget for each in configuration] == [1.125, 0.875]


def test_a_division_goes_on_from_the_scope_and_leaves_out_the_bottoms():
    """Four slots of 5 bytes hold bottoms: 20 of the 60 bytes of six experts of 10 bytes."""
    split = Split((5, 5), (5, 5), 4)
    division = Division.of(6, SECONDS, 2, split)
    assert (division.budget, division.ratios) == (4.0, (0.5, 0.5))
    assert Division.of(6, SECONDS, 2, None) == Division(6.0, SECONDS, (1.0, 1.0))
    activity = Activity([4, 4])
    for layer in range(2):
        activity.token(layer, np.array([0]))  # H(1) = 1: no move gains anything
    assert division(activity, "per-layer") == (2.0, 2.0)
    assert division(activity, (3.0, 1.0)) == (3.0, 1.0)
    assert division(activity, (4.5, 1.5)) == (3.0, 1.0)


def test_with_given_ratios_only_budgets_move():
    """Halves: V = 1 holds the tops of 2 experts, V = 1.25 those of 2 and half of another's hits.

    H = (0.4, 0.6, 0.8) and (1, 1, 1), K = 1, nothing predicted: m = H(V / 0.5) / 2 = 0.3 and 0.5;
    missed 0.7 * 4 and 0.5 * 4, hidden 0.3 and 0.5. With 1.25: m = (0.6 + 0.8) / 2 / 2 = 0.35.
    Layer 1 loses nothing down to V = 0.5: two steps are taken, and in layer 0 nothing remains.
    """
    layers = [unpredicted(0.4, 0.6, 0.8), unpredicted(1.0, 1.0, 1.0)]
    halves = [0.5, 0.5]
    first, second = expert_split(layers, [1.0, 1.0], SECONDS, halves)
    assert (first.cached, first.ratio, first.loaded) == (2, 0.5, pytest.approx(0.3))
    assert (first.exposed, second.exposed) == (pytest.approx(2.5), pytest.approx(1.5))
    assert expert_split(layers, [1.25, 1.0], SECONDS, halves)[0].loaded == pytest.approx(0.35)
    chosen = configure(layers, 2.0, SECONDS, zeta=0.125, ratios=halves)
    assert [each.budget for each in chosen] == [1.5, 0.5]
    assert [each.ratio for each in chosen] == halves
    assert [each.cached for each in chosen] == [3, 1]


@given(st.integers(0, 10_000), st.floats(0.3, 5.0), st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=40, deadline=None)
def test_never_worse_than_uniform_and_within_the_budget(seed, budget, zeta):
    rng = np.random.default_rng(seed)
    activity = Activity([4, 4, 4])
    for _ in range(30):
        for layer in range(3):
            activity.token(layer, rng.choice(4, 2, replace=False), rng.permutation(4))
    layers = layer_statistics(activity)
    configuration = configure(layers, budget, SECONDS, zeta)
    uniform = expert_split(layers, [budget / 3] * 3, SECONDS)
    assert sum(c.exposed for c in configuration) <= sum(c.exposed for c in uniform) + 1e-9
    assert sum(c.budget for c in configuration) == pytest.approx(budget)
    for choice in configuration:
        assert choice.budget > 0
        assert 0 < choice.ratio <= 1
        assert choice.ratio * choice.cached <= choice.budget + 1e-9


def test_latencies_of_a_machine():
    costs = Costs((Link(100.0), Link(50.0)), Work.constant(0.5), Work.constant(0.25))
    assert TokenLatency.of(costs, 200, top_k=2, head=3.0) == TokenLatency(0.25, 1.0, 3.0, 4.0)


def test_what_activity_counts():
    """Worked by hand: the first token finds no priorities, ids decide; the second finds expert 2
    before 0 and 1 (0.25 ** (1 / 128) of one use), and so on."""
    activity = Activity([3])
    activity.token(0, np.array([2]), np.array([0, 2]))  # ranks: 0, 1, 2 -> expert 2 has rank 3
    activity.token(0, np.array([2]), np.array([2]))  # ranks: 2, 0, 1
    activity.token(0, np.array([0]), np.array([1]))  # ranks: 2, 0, 1
    assert activity.hit_ratio(0).tolist() == [0, 1 / 3, 2 / 3, 1]
    assert activity.accuracy(0).tolist() == [0, 1 / 3, 1 / 3, 0]
    both = activity.predicted_hits(0)
    assert both[1].tolist() == [0, 2 / 3, 2 / 3, 1]  # ranks 1, 1 and 3
    assert both[2].tolist() == [0, 0, 0, 1 / 3]
    assert activity._order(0)[:2].tolist() == [2, 0]


def test_activity_continues_from_its_stored_state():
    rng, one, other = np.random.default_rng(3), Activity([3, 5]), Activity([3, 5])
    for token in range(12):
        if token == 6:
            other.restore(one.state())
        for layer, n in enumerate((3, 5)):
            chosen, expected = rng.choice(n, 2, replace=False), rng.permutation(n)
            one.token(layer, chosen, expected)
            if token >= 6:
                other.token(layer, chosen, expected)
    for mine, theirs in zip(one.state().values(), other.state().values(), strict=True):
        assert np.array_equal(mine, theirs)
    for layer in range(2):
        assert np.array_equal(one.predicted_hits(layer), other.predicted_hits(layer))
    with pytest.raises(ValueError, match="'uses' do not fit this model"):
        Activity([4]).restore(one.state())


def test_bad_input():
    with pytest.raises(UsageError, match="zeta must be above 0 and below 1, got 1"):
        configure([unpredicted(1.0)], 1.0, SECONDS, zeta=1.0)
    with pytest.raises(BudgetError, match="the cache must have more than 0 slots, got 0"):
        configure([unpredicted(1.0)], 0.0, SECONDS)
