"""Compiled loops over expert requests: stack depths of LRU and OPT, windows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit

Ints = NDArray[np.int64]


@jit
def stack_depths(pieces: NDArray[Any], group_of: Ints, following: NDArray[Any]) -> Ints:
    """Compute each request's stack depth [N]: the fewest cache slots for a hit.

    The depth is 0 for the first request of a piece. `group_of` [P] is each piece's group; a group
    has one stack. A stack holds a number for each piece: the index of its next request, taken from
    `following` [N] (OPT), or without `following` a number that falls with the index of its last
    request (LRU). The requested piece goes to the top. From there down to its old place, of two
    pieces the one with the smaller number stays and the other moves on.
    """
    count, future = group_of.size, following.size > 0
    depths = np.zeros(pieces.size, np.int64)
    groups = group_of.max() + 1
    first, size = np.zeros(groups + 1, np.int64), np.zeros(groups, np.int64)
    for group in group_of:
        first[group + 1] += 1
    first = first.cumsum()
    stack, last = np.empty(count, np.int64), np.full(count, -1, np.int64)
    for i in range(pieces.size):
        piece = pieces[i]
        group = group_of[piece]
        target, moving = -1 - last[piece], -1 - i
        last[piece] = i
        if future:
            target, moving = i, following[i]
        top, height, depth = first[group], size[group], 0
        while depth < height and (depth == 0 or moving != target):
            entry = stack[top + depth]
            if depth == 0 or entry == target:
                stack[top + depth], moving = moving, entry
            else:
                stack[top + depth], moving = min(entry, moving), max(entry, moving)
            depth += 1
        if depth > 0 and moving == target:
            depths[i] = depth
        else:
            stack[top + height] = moving
            size[group] += 1
    return depths


@jit
def windows(ids: NDArray[Any], starts: Ints, m: int, values: Ints, ranks: Ints) -> int:
    """Count experts' uses in windows of m tokens; return the number of windows.

    A window lies inside a request.

    `ids` [tokens, n] are distinct in a row. Adds the (window, expert) pairs with each number of
    uses to `values` [m + 1], and the uses of a window's most used expert, of its second, and so on
    to `ranks` [experts].
    """
    experts, windows_seen = ranks.size, 0
    for r in range(starts.size - 1):
        begin, end = starts[r], starts[r + 1]
        if end - begin < m:
            continue
        uses = np.zeros(experts, np.int64)  # uses of each expert in the window
        by_uses = np.zeros(m + 1, np.int64)  # how many experts have each number of uses
        by_uses[0] = experts
        for token in range(begin, end):
            for expert in ids[token]:
                by_uses[uses[expert]] -= 1
                uses[expert] += 1
                by_uses[uses[expert]] += 1
            if token - begin < m - 1:
                continue
            windows_seen += 1
            rank = 0
            for value in range(m, 0, -1):
                values[value] += by_uses[value]
                for _ in range(by_uses[value]):
                    ranks[rank] += value
                    rank += 1
            values[0] += by_uses[0]
            for expert in ids[token - m + 1]:
                by_uses[uses[expert]] -= 1
                uses[expert] -= 1
                by_uses[uses[expert]] += 1
    return windows_seen
