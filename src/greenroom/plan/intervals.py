"""Bootstrap confidence intervals of means, and of ratios of paired values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS, LEVEL = 2000, 0.05


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute a mean and its 95 % bootstrap interval: (mean, low, high).

    For a single value, all three are that value.
    """
    sample = np.asarray(values, np.float64)
    indices = np.random.default_rng(0).integers(0, sample.size, (DRAWS, sample.size))
    low, high = np.quantile(sample[indices].mean(1), (LEVEL / 2, 1 - LEVEL / 2)).tolist()
    return float(sample.mean()), low, high


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Compute the geometric mean of ratios, with its 95 % bootstrap interval.

    Returns (mean, low, high) of ones[i] / others[i].
    """
    middle, low, high = np.exp(mean_interval(np.log(np.divide(ones, others)).tolist())).tolist()
    return middle, low, high
