"""Drafts that a part of the model predicts: their chance, and when nothing is predicted."""

from __future__ import annotations

from typing import Any

from greenroom.core.speculation import speculation
from greenroom.core.speculation.model_drafts import FIRST_CHANCE, Chance
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
        new = [5, 6] if draft and right else [6]
        made.record([draft], len(new), seconds_of_two if draft else 1.0)
        drafter.extend(new)
    assert len(drafter) > passes
    return made, calls


def test_right_predictions_are_verified_in_each_pass() -> None:
    made, calls = run(right=True, passes=200, seconds_of_two=1.2)
    assert made.counts.accepted == made.counts.drafted == calls > 100


def test_wrong_predictions_end_and_are_tried_again_rarely() -> None:
    made, calls = run(right=False, passes=1000, seconds_of_two=1.2)
    assert made.counts.accepted == 0
    assert 4 < calls == made.counts.drafted < 16  # after 64, 128, 256 and 512 passes, and at first


def test_predictions_are_tried_again_as_often_as_at_first_once_they_are_worthwhile() -> None:
    chance, tries = Chance(), list[int]()
    for worthwhile in [False] * 500 + [True] + [False] * 200:
        if worthwhile or chance.is_due:
            chance.predict()
            tries.append(0)
        else:
            chance.skip()
            tries.append(1)
    predicted = [at for at, skipped in enumerate(tries) if not skipped]
    assert predicted == [64, 193, 450, 500, 565, 694]


def test_predictions_that_take_too_long_end() -> None:
    _, calls = run(right=True, passes=1000, seconds_of_two=2.5)
    assert calls < 40


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
        drafter.extend([5, 6] if draft else [6])
    assert made.counts.passes > 500
