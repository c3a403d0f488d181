"""Random numbers for compiled policies: splitmix64, one word of memory, the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.policy import compiled

Dice = NDArray[np.uint64]


def dice(seed: int) -> Dice:
    """Dice that fall in the order that the seed says."""
    return np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)


@compiled
def below(dice: Any, n: int) -> int:
    """A whole number from 0 to n - 1, n < 2 ** 32."""
    dice[0] += np.uint64(0x9E3779B97F4A7C15)
    z = dice[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return int(((z >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))
