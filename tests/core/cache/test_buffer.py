from __future__ import annotations

from greenroom.core.cache.buffer import BorrowState, PrefetchBuffer, default_borrow_limit


def filled() -> PrefetchBuffer:
    """Of layer 1 piece 5 is whole and 6 on its way, of layer 2 piece 9 is whole."""
    buffer = PrefetchBuffer(3)
    for piece, slot, layer, chance in ((5, 0, 1, 0.7), (6, 1, 1, 0.9), (9, 2, 2, 0.4)):
        assert not buffer.full
        buffer.begin_prefetch(piece, slot, layer, chance)
    buffer.complete(5)
    buffer.complete(9)
    return buffer


def test_a_buffer_is_full_when_all_its_slots_are_borrowed():
    buffer = filled()
    assert buffer.full
    assert buffer.release(6) == 1
    assert not buffer.full
    assert PrefetchBuffer().full


def test_a_layer_that_was_routed_gives_up_what_it_did_not_use():
    buffer = filled()
    assert [entry.piece for entry in buffer.unused_prefetches(1, {6})] == [5]
    assert {entry.piece for entry in buffer.unused_prefetches(1, ())} == {5, 6}
    assert buffer.unused_prefetches(0, ()) == []
    assert {entry.state for entry in buffer.unused_prefetches(1, ())} == {
        BorrowState.COMPLETE,
        BorrowState.MOVING,
    }


def test_the_least_likely_is_complete_below_a_chance_and_not_excluded():
    buffer = filled()
    assert buffer.least_likely(1.0).piece == 9
    assert buffer.least_likely(1.0, excluded={9}).piece == 5
    assert buffer.least_likely(0.5, excluded={9}) is None  # 6 is on its way
    assert buffer.least_likely(0.4) is None  # below, not at


def test_of_equal_chances_the_smaller_piece_goes():
    buffer = PrefetchBuffer(2)
    for piece in (8, 3):
        buffer.begin_prefetch(piece, piece, 0, 0.5)
        buffer.complete(piece)
    assert buffer.least_likely(1.0).piece == 3


def test_what_a_step_computes_here_is_nobody_s_prefetch_any_more():
    buffer = filled()
    assert buffer.occupy(5) == 0
    assert buffer.occupy(11, 7) == 7
    assert {entry.piece for entry in buffer.unused_prefetches(1, ())} == {6}
    assert buffer.least_likely(1.0).piece == 9
    assert (buffer.borrowed[5].state, buffer.borrowed[11].state) == (
        BorrowState.IN_USE,
        BorrowState.IN_USE,
    )
    assert (buffer.release(5), buffer.release(11)) == (0, 7)
    assert set(buffer.borrowed) == {6, 9}


def test_a_piece_may_come_again_for_another_layer():
    buffer = filled()
    buffer.release(5)
    buffer.begin_prefetch(5, 4, 2, 0.5)
    assert {entry.piece for entry in buffer.unused_prefetches(2, ())} == {5, 9}
    assert {entry.piece for entry in buffer.unused_prefetches(1, ())} == {6}


def test_slots_for_four_layers():
    assert default_borrow_limit(8) == 32
