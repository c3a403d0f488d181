"""Cache-aware routing: which experts a biased router chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.simulate import SimulateConfig
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.events import Landed, Predicted, Routed
from greenroom.core.options.rules.cache_bias import ALWAYS_USED, CacheBias, biased_choice
from greenroom.core.pieces import Pieces
from greenroom.core.plan import overrides
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UsageError
from greenroom.policies import policy
from tests.core.random_driver import carry_out, ids
from tests.options import needs_option

SCORES = np.array([[4.0, 3.0, 2.0, 1.0, 0.9, -6.0]], np.float32)  # a range of 10
CHOSEN = np.array([[0, 1, 2, 3]])


def flags(*experts: int, of: int = 6) -> np.ndarray:
    return np.isin(np.arange(of), experts)


@pytest.mark.parametrize(
    ("bias", "resident", "expected"),
    [
        (0.1, (4,), [0, 1, 2, 4]),  # 0.9 + 1 is more than the 1.0 of expert 3
        (0.005, (4,), [0, 1, 2, 3]),  # 0.95 is less
        (0.1, (3, 4), [0, 1, 2, 3]),  # both have the bias
        (0.3, (4, 5), [0, 1, 4, 2]),  # 3.9 is more than 2.0, but the likeliest come first
        (1.0, (4, 5), [0, 1, 4, 5]),  # never more than two others
        (1.0, (), [0, 1, 2, 3]),
    ],
)
def test_experts_in_the_cache_get_a_share_of_the_range(bias, resident, expected):
    experts = biased_choice(SCORES, CHOSEN, flags(*resident), bias)
    assert sorted(experts[0].tolist()) == sorted(expected)
    assert (np.diff(np.take_along_axis(SCORES, experts, 1)) <= 0).all()


def test_a_token_whose_set_stays_keeps_its_order_too():
    chosen = np.array([[3, 0, 2, 1], [0, 1, 2, 3]])
    scores = np.repeat(SCORES, 2, 0)
    scores[1, 4] = 0.0  # 0 + 0.5 is less than 1.0
    experts = biased_choice(scores, chosen, flags(4), 0.05)
    assert experts[1].tolist() == [0, 1, 2, 3]
    assert experts[0].tolist() == [0, 1, 2, 4]
    assert biased_choice(scores[1:], chosen[1:], flags(4), 0.05) is not experts


def test_equal_scores_stay_with_the_router():
    scores = np.zeros((1, 6), np.float32)
    chosen = np.array([[5, 4, 3]])
    assert biased_choice(scores, chosen, flags(0, 1), 1.0) is chosen  # a range of 0


class Slots:
    """In the scheduler's place: which experts are in slots."""

    def __init__(self, resident: np.ndarray) -> None:
        self.resident = resident

    def in_slots(self, layer: int) -> np.ndarray:
        return self.resident


@st.composite
def routers(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """A router's scores, its choice, the experts in the cache, and a bias."""
    experts, tokens = draw(st.integers(4, 12)), draw(st.integers(1, 3))
    top_k = draw(st.integers(1, experts))
    value = st.one_of(st.floats(-40, 40, width=32), st.sampled_from([0.0, 1.0, -np.inf]))
    rows = st.lists(value, min_size=experts, max_size=experts)
    scores = np.array([draw(rows) for _ in range(tokens)], np.float32)
    scores[:, 0] = np.where(np.isfinite(scores).any(1), scores[:, 0], 0)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    resident = np.array(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
    return scores, chosen, resident, draw(st.floats(0, 1))


@given(routers())
def test_laws_of_a_biased_choice(case):
    scores, chosen, resident, bias = case
    view: Any = Slots(resident)
    experts = CacheBias(bias).choose(0, scores, chosen, view)
    assert experts.shape == chosen.shape
    for row, before, after in zip(scores, chosen.tolist(), experts.tolist(), strict=True):
        assert len({*after}) == len(after)  # as many experts as before
        assert {*before[:ALWAYS_USED]} <= {*after}
        assert all(resident[e] for e in {*after} - {*before})
        lost = {*before} - {*after}
        assert not any(resident[e] for e in lost if row[e] > max(row[e] for e in after))
        if bias == 0:
            assert {*after} == {*before}
    if bias == 0 or resident.all() or not resident.any():
        assert experts is chosen


def test_scores_that_are_no_numbers_change_nothing():
    view: Any = Slots(flags(4))
    scores = np.where(SCORES == 3.0, np.nan, SCORES)
    assert CacheBias(1.0).choose(0, scores, CHOSEN, view) is CHOSEN


def test_an_expert_on_its_way_is_not_in_its_slot():
    """Two layers of four experts: of the second, one is resident and one is being prefetched."""
    pieces = Pieces.unsplit((0, 4, 8), [100, 100], [1] * 8)
    s = Scheduler(pieces, 6, policy("lru"), ahead=2)
    carry_out(s, s.on(Routed(0, 1, ids(5))))
    actions: Any = s.on(Predicted(1, ids(6), certain=True))
    assert s.view.in_slots(0).tolist() == [False] * 4
    assert s.view.in_slots(1).tolist() == [False, True, False, False]
    s.on(Landed(actions[0].lane, actions[0].piece))
    assert s.view.in_slots(1).tolist() == [False, True, True, False]


def test_without_a_bias_there_is_no_option():
    pieces = Pieces.unsplit((0, 4), [100], [1] * 4)
    assert SchedulerConfig().options(pieces) == []
    assert SchedulerConfig().approximation() is None
    (option,) = SchedulerConfig(cache_bias=0.1).options(pieces)
    assert overrides(option, "choose")
    assert not overrides(option, "plan")


def test_a_bias_is_inexact_but_approximates_no_miss():
    at = SchedulerConfig(cache_bias=0.1).approximation()
    assert at == Approximation(bias=0.1)
    assert not at.of_misses
    assert SchedulerConfig(cache_bias=0.1).without_approximation() == SchedulerConfig()


@needs_option("precision")
def test_a_bias_and_approximate_misses_are_inexact_together():
    both = SchedulerConfig(cache_bias=0.1, skip_below=0.2).approximation()
    assert both is not None
    assert (both.bias, both.skip, both.of_misses) == (0.1, 0.2, True)


@pytest.mark.parametrize("bias", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_bias_that_is_no_share_is_refused(bias):
    with pytest.raises(UsageError, match="--cache-bias must be from 0 to 1"):
        SchedulerConfig(cache_bias=bias)


def test_a_simulation_refuses_a_bias():
    with pytest.raises(UsageError, match="no scores of the experts that were not chosen"):
        SimulateConfig(policy="lru", capacity="25%", cache_bias=0.1)
