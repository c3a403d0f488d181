from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.reshape import reshape
from greenroom.core.cache.scope import split_capacity
from greenroom.core.pieces import Pieces
from greenroom.errors import BudgetError, UnknownName
from greenroom.policies import policy
from tests.core.reference import ReferenceCache

LAYERS, EXPERTS = 3, 6
OFFSETS = [EXPERTS * i for i in range(LAYERS + 1)]
PIECES = Pieces.unsplit(OFFSETS, [100] * LAYERS)


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def serve(cache: Cache, *experts: int) -> tuple[list[int], list[int]]:
    served = cache.serve(ids(*experts), 0)
    if served.pinned:
        cache.release(ids(*experts))
    return served.hits.tolist(), served.evicted.tolist()


def test_lru_evicts_the_least_recently_requested():
    cache = Cache(PIECES, 3, policy("lru"))
    assert serve(cache, 0, 1, 2) == ([0, 0, 0], [-1, -1, -1])
    assert serve(cache, 0) == ([1], [-1])
    assert serve(cache, 3) == ([0], [1])
    assert cache.residents().tolist() == [0, 2, 3]


def test_fifo_ignores_hits_and_lfu_keeps_counts_after_eviction():
    fifo, lfu = Cache(PIECES, 2, policy("fifo")), Cache(PIECES, 2, policy("lfu"))
    for cache in (fifo, lfu):
        serve(cache, 0)
        serve(cache, 1)
        serve(cache, 0)
    assert serve(fifo, 2)[1] == [0]
    assert serve(lfu, 2)[1] == [1]
    assert serve(lfu, 1)[1] == [2]  # 1 has two requests by now, 2 has one


def test_a_step_never_evicts_its_own_pieces():
    cache = Cache(PIECES, 3, policy("lru"))
    serve(cache, 3, 4, 5)
    hits, evicted = serve(cache, 1, 2, 3)
    assert hits == [0, 0, 1]
    assert evicted == [4, 5, -1]


def test_a_step_larger_than_the_cache_is_served_without_protection():
    cache = Cache(PIECES, 2, policy("lru"))
    hits, evicted = serve(cache, 0, 1, 2, 3)
    assert hits == [0, 0, 0, 0]
    assert evicted == [-1, -1, 0, 1]


def test_per_layer_scope_spreads_the_remainder_over_the_first_layers():
    assert split_capacity(8, 3, "per-layer") == [3, 3, 2]
    assert split_capacity(8, 3, "shared") == [8]
    with pytest.raises(UnknownName, match="shared, per-layer"):
        split_capacity(8, 3, "both")


def test_invalid_names_and_capacities_are_refused():
    with pytest.raises(BudgetError, match="at least one slot, got 0"):
        Cache(PIECES, 0, policy("lru"))
    with pytest.raises(BudgetError, match="a cache slot for each of 3 layers, got 2"):
        Cache(PIECES, 2, policy("lru"), "per-layer")
    with pytest.raises(UnknownName, match="unknown pin 'all': choose one of step, none"):
        Cache(PIECES, 3, policy("lru")).serve(ids(0), 0, "all")


def test_a_miss_with_every_resident_pinned_is_an_error():
    cache = Cache(PIECES, 1, policy("lru"))
    cache.serve(ids(0), 0)
    with pytest.raises(RuntimeError, match="pinned"):
        cache.serve(ids(1), 0)


steps = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS),
    ),
    max_size=30,
)


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("scope", ["shared", "per-layer"])
@given(steps=steps, capacity=st.integers(LAYERS, LAYERS * EXPERTS + 2))
@settings(max_examples=60, deadline=None)
def test_the_cache_equals_a_simple_reference_cache(name, scope, steps, capacity):
    cache = Cache(PIECES, capacity, policy(name), scope)
    reference = ReferenceCache(OFFSETS, split_capacity(capacity, LAYERS, scope), name)
    for layer, experts in steps:
        pieces = [OFFSETS[layer] + e for e in sorted(experts)]
        hits, evicted = serve(cache, *pieces)
        expected = reference.step(pieces)
        assert list(zip(map(bool, hits), evicted, strict=True)) == expected
        assert set(cache.residents().tolist()) == set().union(*reference.residents)


@pytest.mark.parametrize("scope", ["shared", "per-layer"])
@given(
    steps=steps,
    capacities=st.lists(st.integers(LAYERS, LAYERS * EXPERTS), min_size=1, max_size=6),
)
@settings(max_examples=80, deadline=None)
def test_resize_keeps_the_best_residents_and_their_bytes(scope, steps, capacities):
    """Slots are played by a dict of bytes; a move copies, a transfer writes."""
    cache, place = Cache(PIECES, capacities[0], policy("lru"), scope), np.arange(capacities[0])
    memory: dict[int, int] = {}
    for i, (layer, experts) in enumerate(steps):
        pieces = ids(*(OFFSETS[layer] + e for e in sorted(experts)))
        served = cache.serve(pieces, 0)
        for piece, slot in zip(pieces, served.slots, strict=True):
            memory[int(place[slot])] = int(piece)
        if served.pinned:
            cache.release(pieces)
        capacity = capacities[i % len(capacities)]
        before = set(cache.residents().tolist())
        place, moves = reshape(cache, place, capacity)
        for move in moves:
            assert memory[move.source] == move.piece
            memory[move.target] = move.piece
        after = cache.residents().tolist()
        assert cache.capacity == place.size == capacity
        assert sorted(place) == list(range(capacity))
        assert set(after) <= before
        assert len(after) <= capacity
        for piece in after:
            slot = int(cache.state.slot_of[piece])
            assert 0 <= slot < capacity
            assert memory[int(place[slot])] == piece
        assert int(cache.state.free_count.sum()) == capacity - len(after)
