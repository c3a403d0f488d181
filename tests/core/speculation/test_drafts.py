from __future__ import annotations

import pytest

from greenroom.core.speculation.drafts import (
    CHANCES,
    LEAST_MATCH,
    LONGEST,
    MEMORY,
    Acceptance,
    Drafter,
    History,
)


def drafter(text: list[int], history: History | None = None) -> Drafter:
    made = Drafter(Acceptance(), history)
    made.extend(text)
    return made


def test_a_draft_is_what_followed_the_last_tokens_before() -> None:
    draft = drafter([1, 2, 3, 4, 5, 6, 9, 2, 3]).draft()
    assert list(draft.tokens[:5]) == [4, 5, 6, 9, 2]
    assert len(draft.tokens) == LONGEST
    assert draft.chance == CHANCES[2]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4], [5, 1, 6, 1]])
def test_without_a_match_of_two_tokens_there_is_no_draft(text: list[int]) -> None:
    assert LEAST_MATCH == 2
    assert drafter(text).draft() == ((), 0.0)


def test_earlier_texts_are_drafted_from_and_a_longer_match_wins() -> None:
    history = History()
    history.add([10, 11, 12, 13, 14])
    own = drafter([11, 12, 20, 21], history)
    own.draft()
    own.extend([11, 12])
    assert list(own.draft().tokens[:2]) == [20, 21]  # as long in its own text
    own.extend([13])
    assert list(own.draft().tokens) == [14]
    history.add([5, 6, 7])  # while a text is written
    own.extend([5, 6])
    assert list(own.draft().tokens) == [7]


def test_a_history_forgets_its_oldest_texts() -> None:
    history = History(limit=40)
    for number in range(30):
        history.add([number, number + 1, number + 2, number + 3])
        assert len(history) <= 40
    assert list(drafter([29, 30, 31], history).draft().tokens) == [32]
    assert drafter([3, 4, 5], history).draft().tokens == ()
    history.add(list(range(100, 200)))  # of a text that is too long, its end
    assert list(drafter([197, 198], history).draft().tokens) == [199]
    assert drafter([100, 101], history).draft().tokens == ()


def test_the_new_automaton_is_followed_after_the_history_has_forgotten() -> None:
    history = History(limit=20)
    history.add([1, 2, 3, 4])
    own = drafter([1, 2], history)
    assert list(own.draft().tokens) == [3, 4]
    for number in range(50, 90, 4):
        history.add([number, number + 1, number + 2])
    own.extend([86, 87])
    assert list(own.draft().tokens) == [88]


def test_drafts_are_observed_whether_they_are_used_or_not() -> None:
    acceptance = Acceptance()
    own = Drafter(acceptance)
    own.extend([1, 2, 3, 4, 5, 1, 2])
    before = acceptance.chance(2)
    own.draft()
    own.extend([3, 4])  # right so far
    assert acceptance.chance(2) == before
    own.draft()
    own.extend([9])
    assert acceptance.chance(2) == (4 * CHANCES[2] + 2) / (4 + 3)


def test_chances_follow_what_is_observed_and_forget() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.record(8, right=15, complete=True)
    assert acceptance.chance(8) > 0.95
    assert acceptance.chance(3) == CHANCES[2]
    for _ in range(2 * int(MEMORY)):
        acceptance.record(9, right=0, complete=False)
    assert acceptance.chance(15) < 0.2
    assert acceptance.chance(1000) == CHANCES[-1]
