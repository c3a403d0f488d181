"""The automaton finds what a naive search finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.speculation.automaton import SEPARATOR, Match, SuffixAutomaton

TEXTS = st.integers(1, 5).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.add(token)
    return automaton


def repeated(text: list[int]) -> int:
    """The length of the longest suffix that also ends earlier."""
    size = len(text)
    return max(
        (length for length in range(size) for end in range(length, size)
         if text[end - length : end] == text[size - length :]),
        default=0,
    )  # fmt: skip


def common(text: list[int], other: list[int]) -> int:
    """The length of the longest suffix of `other` that occurs in `text`."""
    return max(
        length for length in range(len(other) + 1) for end in range(length, len(text) + 1)
        if text[end - length : end] == other[len(other) - length :]
    )  # fmt: skip


@given(TEXTS)
def test_the_longest_earlier_suffix_is_found_after_each_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.add(token)
        matched, place = automaton.matched, automaton.place
        assert matched == repeated(text[:count])
        if matched:
            assert matched <= place < count
            assert text[place - matched : place] == text[count - matched : count]
    assert list(automaton.tokens) == text
    assert len(automaton) == len(text)


@given(TEXTS, TEXTS)
def test_the_longest_common_suffix_of_another_text_is_found(
    text: list[int], other: list[int]
) -> None:
    automaton, match = automaton_of(text), Match()
    for count, token in enumerate(other, 1):
        automaton.advance(match, token)
        assert match.length == common(text, other[:count])
        assert text[match.place - match.length : match.place] == other[count - match.length : count]


@given(TEXTS, TEXTS, TEXTS)
def test_a_match_stays_right_while_the_text_grows(
    text: list[int], more: list[int], other: list[int]
) -> None:
    automaton, match = automaton_of(text), Match()
    for count, token in enumerate(other, 1):
        if more:
            text = [*text, more.pop()]
            automaton.add(text[-1])
        automaton.advance(match, token)
        assert common(text[: len(text) - len(more)], []) == 0 <= match.length
        assert match.length <= common(text, other[:count])
        assert text[match.place - match.length : match.place] == other[count - match.length : count]


def test_the_latest_match_is_continued() -> None:
    automaton = automaton_of([1, 2, 7, 1, 2, 8, 1, 2])
    assert automaton.matched == 2
    assert automaton.after(automaton.place, 2) == [8, 1]


def test_a_text_that_ends_is_assumed_to_repeat_itself() -> None:
    automaton = automaton_of([4, 5, 6, 4, 5, 6])
    assert (automaton.matched, automaton.place) == (3, 3)
    assert automaton.after(3, 8) == [4, 5, 6, 4, 5, 6, 4, 5]
    assert automaton.after(6, 3) == []


def test_nothing_follows_a_separator() -> None:
    automaton, match = automaton_of([1, 2, 3, SEPARATOR, 1, 2]), Match()
    for token in (2, 3):
        automaton.advance(match, token)
    assert match.length == 2
    assert automaton.after(match.place, 4) == []
    assert automaton.after(1, 4) == [2, 3]
