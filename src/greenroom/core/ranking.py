"""Top-k: the highest scores of each row, in descending order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit


@jit
def top(scores: NDArray[Any], width: int, above: float = -np.inf) -> NDArray[np.int64]:
    """Return the columns of each row's highest scores, highest first.

    scores: [T, E]
    width:  how many columns are returned for each row, at most E
    above:  scores that are not greater than this are left out

    Returns [T, width]. Equal scores are in the order of their columns. If a row has fewer scores
    than `width`, the rest of it is -1.
    """
    rows, columns = scores.shape
    best = np.full((rows, width), -1, np.int64)
    for t in range(rows):
        count = 0
        for column in range(columns):
            score = scores[t, column]
            if not score > above:
                continue
            if count == width and not score > scores[t, best[t, width - 1]]:
                continue
            at = min(count, width - 1)
            while at > 0 and score > scores[t, best[t, at - 1]]:
                best[t, at] = best[t, at - 1]
                at -= 1
            best[t, at] = column
            count = min(count + 1, width)
    return best
