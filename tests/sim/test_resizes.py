"""A cache that changes its size during a replay."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.errors import UsageError
from greenroom.policies import POLICIES, policy
from greenroom.sim.replay import cut_ranges, replay
from greenroom.sim.study import parse_resizes
from tests.policies.reference import Step
from tests.policies.streams import LAYERS, OFFSETS, as_stream, one_layer, steps, tokens

EXPERTS = OFFSETS[-1]
PIECES = Pieces.unsplit(OFFSETS, [1] * LAYERS)


def test_by_hand() -> None:
    """0 1 2 miss and fill 3 slots; the least recent goes for 2 slots, and 0 misses again."""
    stream = as_stream(one_layer(0, 1, 2, 0, 1))
    assert replay(stream, OFFSETS, 3, policy("lru")).misses == 3
    assert replay(stream, OFFSETS, 3, policy("lru"), resizes=[(3, 2)]).misses == 5
    assert replay(stream, OFFSETS, 2, policy("lru"), resizes=[(3, 3)]).misses == 4
    assert replay(stream, OFFSETS, 1, policy("lru"), resizes=[(0, 3)]).misses == 3
    assert replay(stream, OFFSETS, 3, policy("lru"), resizes=[(9, 1)]).misses == 3


def lru_misses(requests: list[Step], capacity: int, resizes: dict[int, int]) -> int:
    """Misses of one LRU list; what a step asks for is not protected."""
    slots, misses = OrderedDict[int, None](), 0
    for number, step in enumerate(requests):
        capacity = resizes.get(number, capacity)
        while len(slots) > capacity:
            slots.popitem(last=False)
        for piece in step.pieces:
            misses += piece not in slots
            slots[piece] = None
            slots.move_to_end(piece)
            if len(slots) > capacity:
                slots.popitem(last=False)
    return misses


SIZES = st.dictionaries(st.integers(0, 30), st.integers(1, EXPERTS), max_size=4)


@given(requests=steps(), capacity=st.integers(1, EXPERTS), sizes=SIZES)
@settings(max_examples=100, deadline=None)
def test_lru_is_a_list_that_is_cut(
    requests: list[Step], capacity: int, sizes: dict[int, int]
) -> None:
    misses = replay(
        as_stream(requests), OFFSETS, capacity, policy("lru"), pin="none",
        resizes=sorted(sizes.items()),
    ).misses  # fmt: skip
    assert misses == lru_misses(requests, capacity, sizes)


@pytest.mark.parametrize("scope", ["shared", "per-layer"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_resized_as_in_a_run(name: str, scope: str) -> None:
    """The cache of a run, which is resized between two steps, misses the same."""
    requests, sizes = tokens(seed=7, count=60), {40: 4, 90: 9, 100: 3, 150: 12}
    stream, chosen = as_stream(requests), policy(name)
    replayed = replay(stream, OFFSETS, 7, chosen, scope=scope, resizes=sorted(sizes.items()))
    same = replay(stream, OFFSETS, 7, chosen, scope=scope, resizes=[(50, 7)])
    assert same.misses == replay(stream, OFFSETS, 7, chosen, scope=scope).misses
    cache, misses = Cache(PIECES, 7, chosen, scope, trace=stream), 0
    for number, step in enumerate(requests):
        if number in sizes:
            cache.resize(sizes[number])
        pieces = np.array(step.pieces, np.int64)
        at = {"token": step.token, "request": step.prompt}
        served = cache.serve(pieces, step.clock, **at)
        misses += served.misses
        if served.pinned:
            cache.release(pieces)
    if not chosen.needs_trace:  # it would be asked at the time of the step before
        assert replayed.misses == misses
    assert replayed.misses > 0


def test_ranges_are_cut_at_resizes() -> None:
    none = np.empty(0, np.int64)
    cut = cut_ranges([(0, 5, none), (5, 9, none)], [0, 3, 5, 7, 12])
    assert [(first, end) for first, end, _ in cut] == [(0, 3), (3, 5), (5, 7), (7, 9)]


def test_a_list_of_resizes() -> None:
    assert parse_resizes("1000:12%, 2000:64") == [(1000, "12%"), (2000, "64")]
    for text in ("1000", "x:5", "5:", "-1:5", ""):
        with pytest.raises(UsageError, match="--resize"):
            parse_resizes(text)
    for text in ("5:1,5:2", "6:1,5:2"):
        with pytest.raises(UsageError, match="ascending"):
            parse_resizes(text)


def test_requests_that_begin_with_an_empty_cache_exclude_resizes() -> None:
    with pytest.raises(UsageError, match="--resize and --reset exclude each other"):
        replay(as_stream([]), OFFSETS, 4, policy("lru"), reset=True, resizes=[(1, 2)])
