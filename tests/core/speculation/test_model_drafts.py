"""Drafts that a part of the model predicts: their chance, and when nothing is predicted."""

from __future__ import annotations

from typing import Any

from greenroom.core.speculation import speculation
from greenroom.core.speculation.model_drafts import FIRST_CHANCE, LONGEST_WAIT, Chance
from greenroom.core.speculation.pace import PassTimes
from greenroom.core.speculation.speculation import Speculation


def run(right: bool, passes: int, seconds_of_two: float) -> tuple[Speculation, int]:
    """Passes of which each takes 1 s, or `seconds_of_two` with a draft; and the predictions."""
    made, calls = Speculation(16), 0

    def predict() -> int:
        nonlocal calls
        calls += 1
        return 5

    drafter = made.model_drafter(predict)
    drafter.extend([1, 2])
    for _ in range(passes):
        (draft,) = made.choose([drafter], [9])
        assert draft in ([], [5])
        new = [5] * (1 + len(draft)) if right else [6]
        made.record([draft], len(new), seconds_of_two if draft else 1.0)
        drafter.extend(new)
    assert len(drafter) > passes
    return made, calls


def test_right_predictions_are_verified_in_each_pass() -> None:
    made, calls = run(right=True, passes=200, seconds_of_two=1.2)
    assert made.counts.accepted == made.counts.drafted > 150
    assert calls == made.counts.drafted + 2  # after two right predictions the first was verified


def test_wrong_predictions_are_only_compared_and_rarely() -> None:
    made, calls = run(right=False, passes=1000, seconds_of_two=1.2)
    assert made.counts.drafted == 0
    assert calls == 6  # after 8, 16, 32, ... passes


def predicted(events: str, right: str) -> list[int]:
    """The passes with a prediction: of those in `events`, "v" verifies one if there is any.

    `right` tells for each prediction whether it is: "+" or "-"; the last one stands for the rest.
    """
    chance, found = Chance(), list[int]()
    for number, event in enumerate(events):
        if event == "v":
            chance.verify()
        elif chance.is_due:
            chance.compare()
        else:
            chance.skip()
            continue
        found.append(number)
        chance.record(right[min(len(found), len(right)) - 1] == "+")
    return found


def test_wrong_predictions_double_the_passes_until_the_next() -> None:
    assert predicted("." * 300, "-") == [8, 25, 58, 123, 252]


def test_right_predictions_come_in_runs_of_four() -> None:
    assert predicted("." * 60, "+") == [8, 9, 10, 11, 28, 29, 30, 31]
    assert predicted("." * 60, "++-") == [8, 9, 10, 27]


def test_predictions_are_compared_as_often_as_at_first_after_one_was_verified() -> None:
    assert predicted("." * 100 + "v" + "." * 30, "-") == [8, 25, 58, 100, 109, 126]


def test_no_more_passes_than_the_most_lie_between_predictions() -> None:
    found = predicted("." * 5000, "-")
    assert found[-1] - found[-2] == LONGEST_WAIT + 1


def test_predictions_that_take_too_long_end() -> None:
    made, calls = run(right=True, passes=1000, seconds_of_two=2.5)
    assert made.counts.drafted < 15
    assert calls < 120


def test_nothing_is_predicted_where_no_draft_fits(monkeypatch: Any) -> None:
    monkeypatch.setattr(speculation, "PassTimes", PassTimes)
    made, calls = Speculation(16), list[int]()
    drafter = made.model_drafter(lambda: calls.append(1) or 5)
    made.record([[]], 1, 1.0)
    assert made.choose([drafter], [0]) == [[]]
    assert not calls


def test_chances_are_counted() -> None:
    chance = Chance()
    assert chance.value == FIRST_CHANCE
    for _ in range(1000):
        chance.record(False)
    assert chance.value < 0.01
    for _ in range(1000):
        chance.record(True)
    assert chance.value > 0.99


def test_a_time_that_was_long_once_is_measured_again() -> None:
    made = Speculation(16)
    drafter = made.model_drafter(lambda: 5)
    for number in range(3000):
        (draft,) = made.choose([drafter], [9])
        made.record([draft], 1 + len(draft), (9.0 if number < 3 else 1.1) if draft else 1.0)
        drafter.extend([5] * (1 + len(draft)))
    assert made.counts.passes > 500
