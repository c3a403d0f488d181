"""Resizes of the cache in a replay: `simulate --resize 1000:12%,2000:25%`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.cache.bound import bind
from greenroom.core.cache.state import empty_state, preload
from greenroom.core.pieces import Ints
from greenroom.core.policy import CacheState, LogicalTime, Policy
from greenroom.core.stream import Stream
from greenroom.errors import UsageError
from greenroom.trace import Trace


def parse_resizes(text: str) -> list[tuple[int, str]]:
    """Parse a list of resizes, TOKEN:SIZE[,TOKEN:SIZE...]: (token, size as text), ascending.

    Raises UsageError for anything else.
    """
    resizes = []
    for item in text.split(","):
        token, colon, size = item.strip().partition(":")
        if not (colon and token.isdecimal() and size):
            raise UsageError(
                f"--resize {item.strip()!r}: give the number of a token and the size of the cache"
                " from there on, as 1000:12%"
            )
        resizes.append((int(token), size))
    tokens = [token for token, _ in resizes]
    if tokens != sorted(set(tokens)):
        raise UsageError(f"--resize {text}: give every token once, in ascending order")
    return resizes


def steps_of(trace: Trace, stream: Stream, order: str, tokens: Sequence[int]) -> list[int]:
    """Return the step of a replay with which each of some tokens begins.

    In order `runtime`, it is the first step of the forward pass that computes the token.
    """
    if order == "runtime":
        numbers = np.searchsorted(trace.pass_starts, tokens, side="right") - 1
    else:
        numbers = np.asarray(tokens)
    return [int(step) for step in np.searchsorted(stream.token, numbers)]


def cut_ranges(
    ranges: Sequence[tuple[int, int, Ints]], steps: Sequence[int]
) -> list[tuple[int, int, Ints]]:
    """Cut ranges of steps (first, end, pinned experts) where the cache gets another size."""
    cut = []
    for first, end, pinned in ranges:
        inside = [step for step in steps if first < step < end]
        starts = [first, *inside]
        cut += [(a, b, pinned) for a, b in zip(starts, [*inside, end], strict=True)]
    return cut


def resize(
    state: CacheState, memory: object, policy: Policy, layer: Ints, sizes: list[int],
    stream: Stream, step: int,
) -> CacheState:  # fmt: skip
    """Return the state of a cache with other sizes of its slot groups, before a step.

    The policy chooses the victims, as in a run: at the time of the step before.
    """
    last = step - 1
    at = LogicalTime(
        stream.now[last], stream.token[last], stream.request[last] + 0, stream.layer[last] + 0,
        int(stream.prefill[last]), stream.starts[step],
    )  # fmt: skip
    state.pinned[:] = 0
    evict_victim = bind(policy).evict_victim
    residents = np.flatnonzero(state.slot_of >= 0)
    groups = np.bincount(state.group_of[residents], minlength=len(sizes))
    for group, size in enumerate(sizes):
        for _ in range(int(groups[group]) - size):
            evict_victim(state, memory, group, at)
    resized = empty_state(layer, sizes)
    preload(resized, np.flatnonzero(state.slot_of >= 0))
    return resized
