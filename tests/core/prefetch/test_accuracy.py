"""Accuracy and ProMoE's GOODPRED, worked by hand: 3 layers of 4 experts, as in test_prefetching."""

from __future__ import annotations

import pytest

from greenroom.core.prefetch.accuracy import Accuracy, PredictionCounts
from tests.core.prefetch.test_prefetching import ManualDriver


def test_goodpred_is_accuracy_times_the_share_of_absent_predictions_that_arrived():
    accuracy = Accuracy(3)
    assert (accuracy.share(), accuracy.fetch_rate(), accuracy.good()) == (None, None, None)
    accuracy.of(1, 1).add(PredictionCounts(used=4, right=3, absent=2, fetched=1))
    accuracy.of(2, 2).add(PredictionCounts(used=2, right=2, absent=0, fetched=0))
    accuracy.of(2, 1).add(PredictionCounts(used=2, right=1, absent=4, fetched=4))
    rows = accuracy.by_distance()
    assert [list(row.values()) for row in rows] == [
        [1, 1, 0.75, 0.5, 0.375],
        [2, 1, 0.5, 1.0, 0.5],
        [2, 2, 1.0, None, None],  # nothing had to be fetched
    ]
    assert list(rows[0]) == ["layer", "distance", "accuracy", "fetch_rate", "goodpred"]
    assert accuracy.by_layer() == [None, 0.75, 0.75]
    assert accuracy.share() == 6 / 8
    assert accuracy.fetch_rate() == 5 / 6
    assert accuracy.good() == pytest.approx((4 * 0.375 + 2 * 0.5) / 6)
    accuracy.reset()
    assert (accuracy.by_layer(), accuracy.by_distance()) == ([None] * 3, [])


def test_resident_experts_are_not_fetched_in_time():
    """4 is resident, 5 has arrived, 6 is on its way; the router chooses 4, 5 and 7."""
    h = ManualDriver()
    h.step(0, 0)
    h.step(1, 4)
    h.step(0, 0)
    assert h.predict(1, 4, 5, 6, 7) == [(5, 0, False)]
    assert h.started(h.landed()) == [(6, 0, False)]
    h.route(1, 4, 5, 7)
    # of the first three, 4 and 5 are right; 5 and 6 were absent, and 5 arrived
    assert h.s.view.accuracy.counts == {(1, 1): PredictionCounts(3, 2, 2, 1)}
    assert h.s.view.accuracy.good() == pytest.approx(2 / 3 * 1 / 2)


def test_a_wrong_prediction_that_arrived_counts_for_the_fetch_rate():
    """The paper's FETCHRATE is that of predicted experts, right or wrong."""
    h = ManualDriver()
    h.step(0, 0)
    h.predict(1, 5)
    h.settle()
    h.route(1, 6)
    assert h.s.view.accuracy.counts == {(1, 1): PredictionCounts(1, 0, 1, 1)}
    assert h.s.view.accuracy.good() == 0.0


def test_each_distance_is_counted_on_its_own():
    """From layer 0, layer 1 is one layer ahead and layer 2 two; in the end 2 is predicted anew."""
    h = ManualDriver()
    h.step(0, 0)
    h.predict(1, 5)
    h.predict(2, 9)
    h.settle()
    h.step(1, 5)
    h.step(2, 9)
    h.step(0, 0)
    h.predict(2, 9)
    h.step(1, 5)
    h.predict(2, 9)  # the later prediction takes the place of the first
    h.step(2, 9)
    assert h.s.view.accuracy.counts == {
        (1, 1): PredictionCounts(1, 1, 1, 1),
        (2, 2): PredictionCounts(1, 1, 1, 1),
        (2, 1): PredictionCounts(1, 1, 0, 0),  # resident by then
    }


def test_a_prompt_s_predictions_are_not_counted():
    h = ManualDriver()
    h.step(0, 0)
    h.predict(1, 5)
    h.step(1, 5, prefill=True)
    assert h.s.view.accuracy.counts == {}
