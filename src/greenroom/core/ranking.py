"""The highest scores of each row, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit


@jit
def top(scores: NDArray[Any], width: int, above: float = -np.inf) -> NDArray[np.int64]:
    """The columns of the `width` highest scores of each row, highest first: [T, E] -> [T, width].

    Of equal scores the lower column comes first. Width is at most E. Where fewer scores are `above`
    that, -1 stands for the rest.
    """
    rows, columns = scores.shape
    best = np.full((rows, width), -1, np.int64)
    for t in range(rows):
        found = 0
        for column in range(columns):
            score = scores[t, column]
            if not score > above:
                continue
            if found == width and not score > scores[t, best[t, width - 1]]:
                continue
            at = min(found, width - 1)
            while at > 0 and score > scores[t, best[t, at - 1]]:
                best[t, at] = best[t, at - 1]
                at -= 1
            best[t, at] = column
            found = min(found + 1, width)
    return best
