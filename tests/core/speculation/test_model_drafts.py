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
    assert 2 < calls == made.counts.drafted < 200


def test_predictions_that_take_too_long_end() -> None:
    _, calls = run(right=True, passes=1000, seconds_of_two=2.5)
    assert calls < 100


def test_nothing_is_predicted_where_no_draft_fits(monkeypatch: Any) -> None:
    monkeypatch.setattr(speculation, "PassTimes", PassTimes)
    made, calls = Speculation(16), list[int]()
    drafter = made.model_drafter(lambda: calls.append(1) or 5)
    made.record([[]], 1, 1.0)
    assert made.choose([drafter], [0]) == [[]]
    assert not calls


def test_a_low_chance_slowly_returns() -> None:
    chance = Chance()
    assert chance.value == FIRST_CHANCE
    for _ in range(20):
        chance.record(False)
    low = chance.value
    assert low < 0.2
    for _ in range(1000):
        chance.forget()
    assert low < 0.6 < chance.value <= FIRST_CHANCE
