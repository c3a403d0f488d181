"""Another division of slots among layers: who stays, who moves, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.placement import Placement
from greenroom.core.cache.reshape import check_new_scope
from greenroom.core.events import Move, Trim
from greenroom.core.pieces import Pieces, Split
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import policy

OFFSETS = [0, 4, 8]  # two layers of four experts


def serve(cache: Cache, *pieces: int) -> None:
    """Request experts one after the other, each in a step of its own."""
    for step, piece in enumerate(pieces):
        served = np.array([piece])
        cache.serve(served, step)
        cache.release(served)


def places(placement: Placement) -> dict[int, int]:
    return {piece: placement.slot(piece) for piece in placement.cache.residents().tolist()}


def test_unsplit_experts_stay_in_place_and_the_policy_chooses_who_leaves():
    """Two slots a layer become three and one: of layer 1 the last used stays; nothing moves."""
    placement = Placement(Pieces.unsplit(OFFSETS, [9, 9]), 4, policy("lru"), "per-layer", 0, 0)
    serve(placement.cache, 0, 1, 4, 5, 4)
    before = places(placement)
    assert set(before) == {0, 1, 4, 5}
    placement.resize(4, None, (3.0, 1.0))
    assert placement.resizing
    assert placement.apply_resize() == [Trim(4)]
    assert not placement.resizing
    assert placement.cache.sizes == [3, 1]
    assert places(placement) == {piece: before[piece] for piece in (0, 1, 4)}
    serve(placement.cache, 2, 7)
    assert set(places(placement)) == {0, 1, 2, 7}
    assert len(set(places(placement).values())) == 4  # no slot twice


def test_tops_of_a_smaller_layer_move_within_its_slots():
    """Halves: 4 experts' memory less 2 bottoms is that of 6 tops, 3 a layer; then 4 and 2.

    Memory slots of layer 1 are 1, 4, 7 (three kinds of slots). Its least recently used expert, 4,
    leaves; expert 6, in the third slot, moves to the first.
    """
    split = Split((8, 8), (8, 8), secondary_slots=2)
    placement = Placement(Pieces.with_split(OFFSETS, split), 4, policy("lru"), "per-layer", 0, 0)
    assert placement.cache.sizes == [3, 3]
    serve(placement.cache, 0, 4, 5, 6)
    assert places(placement) == {0: 0, 4: 1, 5: 4, 6: 7}
    placement.resize(4, None, (2.0, 1.0))
    assert placement.apply_resize() == [Move(6, 7, 1), Trim(4)]
    assert placement.cache.sizes == [4, 2]
    assert places(placement) == {0: 0, 5: 4, 6: 1}


def test_impossible_divisions_are_refused_and_change_nothing():
    pieces = Pieces.unsplit(OFFSETS, [9, 9])
    shared = Cache(pieces, 4, policy("lru"))
    with pytest.raises(UsageError, match="whose layers share all slots cannot be divided"):
        check_new_scope(shared, 4, (3.0, 1.0))
    cache = Cache(pieces, 4, policy("lru"), "per-layer")
    with pytest.raises(UsageError, match="cannot be divided among them later, nor the other way"):
        check_new_scope(cache, 4, "shared")
    with pytest.raises(UsageError, match="--scope has 3 numbers, but the model has 2 layers"):
        check_new_scope(cache, 4, (1.0, 1.0, 2.0))
    cache.pin(np.array([4]))
    with pytest.raises(BudgetError, match="1 pinned experts leave none of 1 cache slots"):
        check_new_scope(cache, 4, (3.0, 1.0))
    assert (cache.scope, cache.sizes) == ("per-layer", [2, 2])
