"""Registration of host memory in pieces: whole slots and pages, progress, refusals, Ctrl-C."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.registration import Registration, pieces_of_memory

PAGE = 4096


class Limited(Engine):
    """A device that registers at most so many bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.ranges, self.undone = limit, dict[int, int](), list[int]()

    def register(self, address: int, nbytes: int) -> str | None:
        if sum(self.ranges.values()) + nbytes > self.limit:
            return "limit of locked memory"
        self.ranges[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        self.undone.append(address)
        del self.ranges[address]


def starts(*counts_and_sizes: tuple[int, int]) -> np.ndarray:
    """The first bytes of slots: so many of a size, then so many of another."""
    sizes = [size for count, size in counts_and_sizes for _ in range(count)]
    return np.cumsum([0, *sizes])[:-1]


def test_pieces_begin_where_slots_do():
    slots = starts((4, 2 * PAGE), (3, 3 * PAGE))  # 8 pages, then 9
    assert pieces_of_memory(slots, 17 * PAGE, 5 * PAGE) == [
        (0, 4 * PAGE), (4 * PAGE, 4 * PAGE), (8 * PAGE, 3 * PAGE), (11 * PAGE, 3 * PAGE),
        (14 * PAGE, 3 * PAGE),
    ]  # fmt: skip
    assert pieces_of_memory(slots, 17 * PAGE, 100 * PAGE) == [(0, 17 * PAGE)]


def test_a_slot_is_not_cut_although_it_is_larger_than_a_piece():
    assert pieces_of_memory(starts((3, 4 * PAGE)), 12 * PAGE, PAGE) == [
        (0, 4 * PAGE), (4 * PAGE, 4 * PAGE), (8 * PAGE, 4 * PAGE),
    ]  # fmt: skip


def test_slots_that_share_a_page_are_in_one_piece():
    slots = starts((8, 1024 + PAGE))  # every fourth one begins with a page
    assert pieces_of_memory(slots, 8 * (1024 + PAGE), PAGE) == [
        (0, 5 * PAGE), (5 * PAGE, 5 * PAGE),
    ]  # fmt: skip


def test_no_memory_has_no_pieces():
    assert pieces_of_memory(np.zeros(0, np.int64), 0, PAGE) == []


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=3),
    st.integers(1, 100),
)
def test_pieces_are_all_memory_in_order(groups: list[tuple[int, int]], most: int) -> None:
    groups = [(count, 64 * size) for count, size in groups]
    slots, end = starts(*groups), sum(count * size for count, size in groups)
    pieces, at = pieces_of_memory(slots, end, most * PAGE), 0
    for i, (first, nbytes) in enumerate(pieces):
        assert first == at
        assert first % PAGE == 0
        assert first in slots
        assert nbytes > 0
        if nbytes > most * PAGE:  # because no slot within begins with a page
            inside = slots[(slots > first) & (slots < first + nbytes)]
            assert not (inside % PAGE == 0).any()
        elif i + 1 < len(pieces):  # the next piece did not fit too
            begin = first + nbytes
            further = [*slots[(slots > begin) & (slots % PAGE == 0)].tolist(), end]
            assert further[0] - first > most * PAGE
        at += nbytes
    assert at == end


def test_pieces_are_registered_with_progress_until_one_is_refused():
    engine, shares = Limited(10 * PAGE), list[float]()
    registration = Registration(engine)
    registration.add(1 << 20, [(0, 4 * PAGE), (4 * PAGE, 4 * PAGE), (8 * PAGE, 8 * PAGE)],
                     shares.append)  # fmt: skip
    assert engine.ranges == {1 << 20: 4 * PAGE, (1 << 20) + 4 * PAGE: 4 * PAGE}
    assert (registration.nbytes, registration.refused) == (8 * PAGE, "limit of locked memory")
    assert shares == [0.25, 0.5]
    registration.close()
    registration.close()
    assert engine.ranges == {}
    assert len(engine.undone) == 2
    assert registration.nbytes == 0


class Interrupted(Limited):
    """A device whose calls take so long that Ctrl-C comes within one of them."""

    at = ""

    def register(self, address: int, nbytes: int) -> str | None:
        refused = super().register(address, nbytes)
        if self.at == "register":
            signal.raise_signal(signal.SIGINT)
        return refused

    def unregister(self, address: int) -> None:
        super().unregister(address)
        if self.at == "unregister":
            signal.raise_signal(signal.SIGINT)


def test_a_piece_that_ctrl_c_meets_is_known(ctrl_c):
    engine = Interrupted(limit=100 * PAGE)
    registration, engine.at = Registration(engine), "register"
    with pytest.raises(KeyboardInterrupt):
        registration.add(0, [(0, PAGE), (PAGE, PAGE)], lambda share: None)
    registration.close()
    assert engine.undone == [0]


def test_all_pieces_are_unregistered_before_ctrl_c_is_raised(ctrl_c):
    """Nobody closes a registration again."""
    engine = Interrupted(limit=100 * PAGE)
    registration = Registration(engine)
    registration.add(0, [(n * PAGE, PAGE) for n in range(3)], lambda share: None)
    engine.at = "unregister"
    with pytest.raises(KeyboardInterrupt):
        registration.close()
    assert not engine.ranges
