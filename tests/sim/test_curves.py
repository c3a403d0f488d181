from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.errors import UnknownName
from greenroom.policies import policy
from greenroom.sim.curves import curve_capacities, lru_curve, opt_curve
from greenroom.sim.replay import replay
from tests.policies.reference import Step
from tests.policies.streams import LAYERS, OFFSETS, as_stream, steps, tokens

CURVES = {"lru": lru_curve, "opt": opt_curve}


@pytest.mark.parametrize("name", CURVES)
@given(steps=steps(30), reset=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_curve_equals_replays_at_every_capacity(name, steps, reset):
    stream = as_stream(steps)
    for scope in ("shared", "per-layer", (1.0, 2.5, 0.5)[:LAYERS]):
        result = CURVES[name](stream, OFFSETS, scope=scope, reset=reset)
        least = 1 if scope == "shared" else LAYERS
        assert result.capacities.tolist() == list(range(least, OFFSETS[-1] + 1))
        assert result.requests == stream.pieces.size
        for capacity, misses in zip(result.capacities.tolist(), result.misses, strict=True):
            done = replay(
                stream, OFFSETS, capacity, policy(name), scope=scope, pin="none", reset=reset
            )
            assert done.misses == misses


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_equals_replays_of_a_long_stream(name):
    chance = np.random.default_rng(5)
    pieces = (chance.zipf(1.2, 6000) % 100).tolist()
    stream = as_stream([Step([p], i, i, 0, 0, [], []) for i, p in enumerate(pieces)])
    result = CURVES[name](stream, [0, 100])
    for capacity in (1, 7, 33, 64, 65, 99, 100):
        done = replay(stream, [0, 100], capacity, policy(name), pin="none")
        assert done.misses == result.misses[capacity - 1]


def test_a_curve_equals_counts_by_hand():
    """a b c a: a comes back at depth 3. b b: at depth 1."""
    stream = as_stream([Step([p], i, i, 0, 0, [], []) for i, p in enumerate([0, 1, 2, 0, 1, 1])])
    assert lru_curve(stream, [0, 4]).misses.tolist() == [5, 5, 3, 3]
    assert opt_curve(stream, [0, 4]).misses.tolist() == [5, 4, 3, 3]


@pytest.mark.parametrize("curve", CURVES.values())
def test_an_unknown_scope_is_an_error(curve):
    stream = as_stream(tokens(1, 3))
    with pytest.raises(UnknownName, match="unknown scope 'both'"):
        curve(stream, OFFSETS, scope="both")


def test_curve_capacities_include_the_requested_ones_and_all_experts():
    points = list(curve_capacities([7, 26], 100, 3))
    assert points == sorted(set(points))
    assert {7, 26, 100} <= set(points)
    assert points[0] >= 3
