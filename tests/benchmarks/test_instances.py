from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers import instances
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.curves import opt_curve
from greenroom.sim.replay import replay
from greenroom.trace import stream


def misses(trace, name, k, scope="shared", seed=0):
    requests = stream(trace, "natural")
    done = replay(requests, trace.offsets, k, policy(name), scope=scope, pin="none", seed=seed)
    return done.misses


def opt(trace, k):
    return int(opt_curve(stream(trace, "natural"), trace.offsets).misses[k - 1])


@pytest.mark.parametrize("name", ["lru", "marking"])
def test_a_cache_for_each_layer_misses_for_ever_where_a_shared_one_does_not(name):
    layers, experts = 3, 4
    for rounds in (40, 400):
        trace = instances.one_cycles(layers, experts, rounds)
        for k in range(experts + layers - 1, layers * experts):
            assert opt(trace, k) == experts + layers - 1
            assert misses(trace, name, k, "per-layer") >= rounds // experts


@pytest.mark.parametrize("name", ["lru", "lfu", "llru"])
@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (3, 2), (4, 5)])
def test_a_policy_misses_every_round_of_a_trace_made_against_it(name, layers, experts):
    """Theorem 3.2; the misses of the first rounds are allowed for."""
    k, rounds = layers * experts - 1, 600
    trace = instances.cruel(policy(name), layers, experts, rounds)
    changed = (np.diff(trace.experts[..., 0].astype(int), axis=0) != 0).sum(axis=1)
    assert (changed <= 1).all()  # 0 where it evicts what it has just brought in
    assert misses(trace, name, k) >= rounds
    assert opt(trace, k) <= k + 1 + rounds / (k - layers + 1)


def test_traces_made_against_different_policies_differ():
    traces = [instances.cruel(policy(name), 3, 4, 50).experts for name in ("lru", "llru", "lfu")]
    assert any((traces[0] != other).any() for other in traces[1:])
    again = instances.cruel(policy("lru"), 3, 4, 50).experts
    np.testing.assert_array_equal(traces[0], again)


def test_no_trace_can_be_made_against_a_policy_that_knows_it():
    with pytest.raises(UsageError, match="opt must know the trace"):
        instances.cruel(policy("opt"), 2, 2, 5)


@pytest.mark.parametrize(("layers", "experts"), [(1, 5), (6, 2), (4, 4)])
def test_lru_misses_every_request_where_all_layers_cycle(layers, experts):
    """Theorem 3.3."""
    k, rounds = layers * experts - 1, 40 * layers * experts
    trace = instances.all_cycle(layers, experts, rounds)
    requests = rounds * layers
    assert misses(trace, "lru", k) == requests
    assert opt(trace, k) <= k + 1 + (requests - k) / k


@pytest.mark.parametrize("name", ["lru", "marking"])
def test_misses_of_uniform_requests_keep_the_bounds_of_the_theorem(name):
    """Theorem 3.4: misses >= rounds / n, and their ratio to OPT's >= max(H_n, log(l) / 6n)."""
    layers, experts, rounds = 4, 3, 20_000
    trace = instances.uniform(layers, experts, rounds, seed=2)
    k = layers * experts - 1
    missed, floor = misses(trace, name, k), opt(trace, k)
    assert missed >= 0.97 * rounds / experts
    expected = instances.expected_cover_time(experts, layers)
    assert 0.97 * rounds / expected <= floor <= 1.03 * rounds / (expected - 1)
    assert missed / floor >= instances.cover_bound(experts, layers) / experts


def test_with_one_layer_marking_misses_less_than_the_bound():
    """n = k + 1 pages and no layers: Marking's ratio is H_k (Fiat et al.), which is less than H_n:
    the request that ends a block of the proof begins the next one too."""
    trace = instances.uniform(1, 4, 40_000, seed=3)
    ratio = misses(trace, "marking", 3) / opt(trace, 3)
    assert ratio == pytest.approx(1 + 1 / 2 + 1 / 3, rel=0.03)
    assert ratio < instances.cover_bound(4, 1) / 4


def slow_cover_time(coupons, collectors, random):
    has, rounds = np.zeros((collectors, coupons), bool), 0
    while not has.all():
        for collector in range(collectors):
            has[collector, random.integers(coupons)] = True
        rounds += 1
    return rounds


@pytest.mark.parametrize(("coupons", "collectors"), [(1, 3), (2, 1), (2, 40), (5, 7)])
def test_cover_times_equal_those_of_simulated_collectors(coupons, collectors):
    random = np.random.default_rng(1)
    drawn = [slow_cover_time(coupons, collectors, random) for _ in range(600)]
    exact = instances.expected_cover_time(coupons, collectors)
    assert np.mean(drawn) == pytest.approx(exact, rel=0.06)
    quick = instances.cover_times(coupons, collectors, 4000, seed=5)
    assert quick.mean() == pytest.approx(exact, rel=0.03)
    assert np.std(quick) == pytest.approx(np.std(drawn), rel=0.15, abs=1e-9)


def test_expected_cover_times_equal_hand_computed_ones():
    assert instances.expected_cover_time(1, 9) == pytest.approx(1)
    assert instances.expected_cover_time(6, 1) == pytest.approx(
        6 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6)
    )
    # Two coupons: P(T > t) = 1 - (1 - 2 ** (1 - t)) ** C from t = 1 on; C = 2 sums to 1 + 1 + 5/3.
    assert instances.expected_cover_time(2, 2) == pytest.approx(11 / 3)


@pytest.mark.parametrize("coupons", [2, 3, 8, 64])
@pytest.mark.parametrize("collectors", [1, 2, 100, 10**6])
def test_expected_cover_times_are_at_least_the_bound(coupons, collectors):
    """Theorem 3.5."""
    exact = instances.expected_cover_time(coupons, collectors)
    assert exact >= instances.cover_bound(coupons, collectors) * (1 - 1e-12)
