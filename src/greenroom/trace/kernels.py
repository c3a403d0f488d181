"""Compiled loops of the locality metrics: each goes over the tokens once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit

Ints = NDArray[np.int64]


@jit
def reuse(ids: NDArray[Any], experts: int, distances: Ints, gaps: Ints) -> None:
    """Reuse of one layer's experts; `ids` [tokens, top_k].

    `distances` [experts + 1] counts, for each use, the distinct other experts used since the last
    use of the same one (a token's experts come in the order stored); the last entry counts first
    uses. `gaps` [longest + 1] counts the tokens since the last use; longer ones go to the last.
    """
    stack = np.empty(experts, np.int64)  # the last used first
    last = np.full(experts, -1, np.int64)
    held = 0
    for token in range(ids.shape[0]):
        for expert in ids[token]:
            if last[expert] < 0:
                distances[experts] += 1
                depth = held
                held += 1
            else:
                depth = 0
                while stack[depth] != expert:
                    depth += 1
                distances[depth] += 1
                gaps[min(token - last[expert], gaps.size - 1)] += 1
            for i in range(depth, 0, -1):
                stack[i] = stack[i - 1]
            stack[0] = expert
            last[expert] = token


@jit
def windows(ids: NDArray[Any], starts: Ints, m: int, values: Ints, ranks: Ints) -> int:
    """Every window of m tokens inside a request; `ids` [tokens, n], distinct in a row.

    `values` [m + 1] counts how many (window, expert) pairs have each number of uses; `ranks`
    [experts] sums over windows the uses of the most used expert, the second, ... The number of
    windows is returned.
    """
    experts, found = ranks.size, 0
    for r in range(starts.size - 1):
        begin, end = starts[r], starts[r + 1]
        if end - begin < m:
            continue
        uses = np.zeros(experts, np.int64)  # of each expert in the window
        many = np.zeros(m + 1, np.int64)  # experts with this many uses
        many[0] = experts
        for token in range(begin, end):
            for expert in ids[token]:
                many[uses[expert]] -= 1
                uses[expert] += 1
                many[uses[expert]] += 1
            if token - begin < m - 1:
                continue
            found += 1
            rank = 0
            for value in range(m, 0, -1):
                values[value] += many[value]
                for _ in range(many[value]):
                    ranks[rank] += value
                    rank += 1
            values[0] += many[0]
            for expert in ids[token - m + 1]:
                many[uses[expert]] -= 1
                uses[expert] -= 1
                many[uses[expert]] += 1
    return found
