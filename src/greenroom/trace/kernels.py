"""Compiled loops over a trace's requests for experts: stack depths, and counts in windows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit

Ints = NDArray[np.int64]


@jit
def stack_depths(pieces: NDArray[Any], group_of: Ints, following: NDArray[Any]) -> Ints:
    """Compute each expert request's stack depth: the size of the smallest cache that hits.

    The caches evict by LRU, or by Belady's OPT (Mattson et al., 1970).

    pieces:    the requested cache entries (experts), in order
    group_of:  the group of each piece; every group has a cache of its own
    following: the index of the next request of the same piece, for OPT; empty for LRU

    Returns an array like `pieces`; the depth is 0 at the first request of a piece.
    """
    # Each group has a stack with a number for each piece: its next request (OPT), or a number that
    # falls with its last request (LRU). The requested piece goes to the top. From the top down to
    # the piece's old place, of two neighbours the one with the smaller number stays, and the other
    # moves down.
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
    """Count the uses of experts in all windows of m tokens; return the number of windows.

    A window is m adjacent tokens of one request.

    ids:    the experts of each token, [tokens, experts of a token], distinct in a row
    starts: the first token of each request, then the number of tokens
    values: values[v] is increased by the number of (window, expert) pairs with v uses, [m + 1]
    ranks:  ranks[r] is increased by the uses of each window's r-th most used expert, from 0,
            [experts]
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
