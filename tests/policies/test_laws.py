"""Laws that every policy in the table keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.errors import UnknownName
from greenroom.policies import DEFAULT, POLICIES, policy

PIECES = Pieces.whole([0, 5, 10], [1, 1])
requests = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), max_size=40)


def run(name: str, capacity: int, steps: list[set[int]]) -> int:
    cache, misses = Cache(PIECES, capacity, policy(name)), 0
    for i, experts in enumerate(steps):
        pieces = np.array([e + 5 * (i % 2) for e in sorted(experts)], np.int64)
        served = cache.serve(pieces, i)
        assert not set(served.evicted.tolist()) & set(pieces.tolist())
        cache.release(pieces)
        assert len(cache.residents()) <= capacity
        misses += int((served.hits == 0).sum())
    return misses


@pytest.mark.parametrize("name", POLICIES)
@given(steps=requests, capacity=st.integers(3, 9))
@settings(max_examples=60, deadline=None)
def test_never_evicts_a_pinned_piece(name, steps, capacity):
    run(name, capacity, steps)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=requests)
@settings(max_examples=40, deadline=None)
def test_with_room_for_all_each_piece_is_missed_once(name, steps):
    distinct = {(i % 2, e) for i, experts in enumerate(steps) for e in experts}
    assert run(name, 10, steps) == len(distinct)


@given(steps=st.lists(st.integers(0, 4), max_size=60), capacity=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_a_larger_lru_cache_holds_all_that_a_smaller_one_does(steps, capacity):
    small, large = (Cache(PIECES, c, policy("lru")) for c in (capacity, capacity + 1))
    for i, expert in enumerate(steps):
        piece = np.array([expert + 5 * (i % 2)], np.int64)
        for cache in (small, large):
            cache.serve(piece, i, pin="none")
        assert set(small.residents()) <= set(large.residents())


def test_an_unknown_name_lists_the_known_ones():
    assert policy("auto").name == DEFAULT
    with pytest.raises(UnknownName, match=r"unknown policy 'mru'.*auto, lru, fifo, lfu"):
        policy("mru")
