from __future__ import annotations

import numpy as np
import pytest

from greenroom.plan import intervals


def test_of_one_value_there_is_no_interval():
    assert intervals.mean_interval([3.0]) == (3.0, 3.0, 3.0)
    assert intervals.ratio_interval([3.0], [2.0]) == pytest.approx((1.5, 1.5, 1.5))


def test_pairs_that_drift_together_have_a_sharp_ratio():
    base = np.array([1.0, 2.0, 4.0, 8.0])
    assert intervals.ratio_interval(0.9 * base, base) == pytest.approx((0.9, 0.9, 0.9))
    middle, low, high = intervals.mean_interval(base)
    assert low < middle == 3.75 < high


def test_the_interval_covers_nineteen_in_twenty():
    draw, inside = np.random.default_rng(0), 0
    for _ in range(200):
        _, low, high = intervals.mean_interval(draw.normal(1.0, 0.1, 20).tolist())
        inside += low <= 1.0 <= high
    assert 170 <= inside <= 200
