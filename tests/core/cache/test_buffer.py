from __future__ import annotations

from greenroom.core.cache.buffer import BorrowState, PrefetchBuffer, default_borrow_limit


def filled() -> PrefetchBuffer:
    """A buffer: layer 1 has piece 5 complete and 6 on its way, layer 2 has 9 complete."""
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


def test_unused_prefetches_of_a_routed_layer_are_found():
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


def test_the_smallest_piece_is_least_likely_at_equal_chances():
    buffer = PrefetchBuffer(2)
    for piece in (8, 3):
        buffer.begin_prefetch(piece, piece, 0, 0.5)
        buffer.complete(piece)
    assert buffer.least_likely(1.0).piece == 3


def test_a_slot_in_use_is_no_prefetch_any_more():
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


def test_the_default_borrow_limit_is_four_layers_of_experts():
    assert default_borrow_limit(8) == 32
