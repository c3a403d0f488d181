"""SCH as the published code of "Not All Models Suit Expert Offloading" computes it.

A cache of one layer runs over each request. It knows the next `length` tokens, from the present one
on: on a miss it evicts the expert that they use least, of equals the least recently used one.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit
def lookahead_hits(
    ids: np.ndarray, starts: np.ndarray, length: int, capacity: int, experts: int
) -> int:
    """Count the hits of a layer's cache of `capacity` experts, which is empty before each request.

    ids [tokens, top_k] are the experts that tokens use, `starts` the first tokens of requests. All
    of a token's experts are looked up before any of them enters the cache. The first use of an
    expert while the cache has room counts as a hit, as in the published code.
    """
    hits = 0
    for r in range(len(starts) - 1):
        begin, end = starts[r], starts[r + 1]
        future = np.zeros(experts, np.int64)  # uses in the next tokens
        last = np.zeros(experts, np.int64)  # the time of the last use; 0: none
        resident = np.zeros(experts, np.bool_)
        size, clock, distinct = 0, 0, 0
        for t in range(begin, min(begin + length, end)):
            for x in ids[t]:
                future[x] += 1
        for t in range(begin, end):
            for x in ids[t]:
                if resident[x]:
                    hits += 1
                elif last[x] == 0:
                    hits += distinct < capacity
                    distinct += 1
            for x in ids[t]:
                if not resident[x]:
                    if size == capacity:
                        victim = -1
                        for e in range(experts):
                            if resident[e] and (
                                victim < 0
                                or future[e] < future[victim]
                                or (future[e] == future[victim] and last[e] < last[victim])
                            ):
                                victim = e
                        resident[victim] = False
                        size -= 1
                    resident[x] = True
                    size += 1
                future[x] -= 1
                clock += 1
                last[x] = clock
            if t + length < end:
                for x in ids[t + length]:
                    future[x] += 1
    return hits
