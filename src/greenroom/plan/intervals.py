"""Intervals over repetitions: how sure a mean, or a ratio of two, is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS, LEVEL = 2000, 0.05


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of a bootstrap over the values; of one value there is
    none, and all three are it."""
    taken = np.asarray(values, np.float64)
    drawn = taken[_draws(taken.size)].mean(1)
    return float(taken.mean()), *_ends(drawn)


def ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """(geometric mean of one / other, low, high) over pairs of the same repetition."""
    logs = np.log(np.asarray(ones, np.float64) / np.asarray(others, np.float64))
    middle, low, high = np.exp([logs.mean(), *_ends(logs[_draws(logs.size)].mean(1))]).tolist()
    return middle, low, high


def _draws(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, n, (DRAWS, n))


def _ends(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2)).tolist()
    return low, high
