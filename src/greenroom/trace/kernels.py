"""Compiled loops over requests: depths in the stacks of LRU and OPT, and windows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit

Ints = NDArray[np.int64]


@jit
def stack_depths(pieces: NDArray[Any], group_of: Ints, following: NDArray[Any]) -> Ints:
    """The depth of each request in its group's stack, [N]: the fewest slots with which it is a hit;
    0 for the first one of a piece. `group_of` [P] is each piece's group.

    A stack holds a number for each piece: the index of its next request where `following` [N] says
    it (OPT), else one that falls with the index of its last request (LRU). The piece requested goes
    to the top; on the way down to where it was, of two pieces that with the smaller number stays
    and the other moves on.
    """
    count, future = group_of.size, following.size > 0
    found = np.zeros(pieces.size, np.int64)
    groups = group_of.max() + 1
    first, size = np.zeros(groups + 1, np.int64), np.zeros(groups, np.int64)
    for group in group_of:
        first[group + 1] += 1
    first = first.cumsum()
    stack, last = np.empty(count, np.int64), np.full(count, -1, np.int64)
    for i in range(pieces.size):
        piece = pieces[i]
        group = group_of[piece]
        wanted, moving = -1 - last[piece], -1 - i
        last[piece] = i
        if future:
            wanted, moving = i, following[i]
        top, held, depth = first[group], size[group], 0
        while depth < held and (depth == 0 or moving != wanted):
            here = stack[top + depth]
            if depth == 0 or here == wanted:
                stack[top + depth], moving = moving, here
            else:
                stack[top + depth], moving = min(here, moving), max(here, moving)
            depth += 1
        if depth > 0 and moving == wanted:
            found[i] = depth
        else:
            stack[top + held] = moving
            size[group] += 1
    return found


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
