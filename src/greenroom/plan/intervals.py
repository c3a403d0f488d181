"""Intervals over repetitions: how sure a mean, or a ratio of two, is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS, LEVEL = 2000, 0.05


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of a bootstrap over the values; of one value there is
    none, and all three are it."""
    sample = np.asarray(values, np.float64)
    indices = np.random.default_rng(0).integers(0, sample.size, (DRAWS, sample.size))
    low, high = np.quantile(sample[indices].mean(1), (LEVEL / 2, 1 - LEVEL / 2)).tolist()
    return float(sample.mean()), low, high


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """(geometric mean of one / other, low, high) over pairs of the same repetition."""
    middle, low, high = np.exp(mean_interval(np.log(np.divide(ones, others)).tolist())).tolist()
    return middle, low, high
