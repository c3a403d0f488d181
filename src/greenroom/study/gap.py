"""The gap between LRU and OPT: which share of it an eviction policy closes."""

from __future__ import annotations

import numpy as np

from greenroom.errors import UnknownName
from greenroom.trace import Trace

HALVES = ("report", "tuning")


def gap_closed(lru: int, policy: int, opt: int) -> float:
    """Compute the share of the gap between LRU and OPT that an eviction policy closes.

    The arguments are misses of the same requests. 1 is OPT, which knows the future; a negative
    share means more misses than LRU. It is 0 where LRU misses no more than OPT.
    """
    return (lru - policy) / (lru - opt) if lru > opt else 0.0


def half_of(trace: Trace, half: str, seed: int | None = None) -> Trace:
    """Select half of a trace's requests: those for tuning policies, or those for reporting.

    Requests 0, 2, 4, ... are for tuning, 1, 3, 5, ... for reporting. They are in stored order, or
    shuffled by the seed. Raises UnknownName for another half.
    """
    if half not in HALVES:
        raise UnknownName("half", half, HALVES)
    chosen = np.arange(half == "report", trace.requests, 2)
    if seed is not None:
        chosen = np.random.default_rng(seed).permutation(chosen)
    return trace.select(chosen)
