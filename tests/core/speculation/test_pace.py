from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.speculation.drafts import Draft
from greenroom.core.speculation.pace import PassTimes, worthwhile


def measured(one: float, fixed: float, each: float) -> PassTimes:
    """Passes of r tokens take `one` for a single one, else fixed + each * r."""
    times = PassTimes()
    for _ in range(60):
        times.record(1, one)
        for tokens in (2, 5, 9):
            times.record(tokens, fixed + each * tokens)
    return times


def test_times_of_passes_are_learnt() -> None:
    times = measured(1.0, 1.4, 0.1)
    assert times.seconds(1) == pytest.approx(1.0)
    for tokens in (2, 8, 16):
        assert times.seconds(tokens) == pytest.approx(1.4 + 0.1 * tokens, rel=0.1)


def test_slow_passes_of_long_ago_are_forgotten() -> None:
    times = measured(1.0, 8.0, 0.1)
    assert times.seconds(2) > 7
    for _ in range(2000):
        times.record(1, 1.0)
    assert times.seconds(2) < 2


def test_one_slow_pass_says_little_and_several_are_believed() -> None:
    times = PassTimes()
    times.record(1, 1.0)
    expected = times.seconds(2)
    times.record(2, 9.0)
    assert expected < times.seconds(2) < 1.25 * expected
    for _ in range(40):
        times.record(2, 9.0)
    assert times.seconds(2) == pytest.approx(9.0, rel=0.1)


def test_before_the_first_pass_nothing_is_drafted() -> None:
    times = PassTimes()
    assert not times.is_ready
    assert worthwhile([Draft([1] * 9, 1.0)], times, 16) == [0]
    times.record(1, 0.5)
    assert times.is_ready
    assert worthwhile([Draft([1] * 9, 1.0)], times, 16) == [9]


def test_a_draft_must_be_worth_its_time() -> None:
    times = measured(1.0, 1.0, 0.2)
    assert worthwhile([Draft([1] * 9, 0.95)], times, 16)[0] > 5
    assert worthwhile([Draft([1] * 9, 0.1)], times, 16) == [0]
    assert worthwhile([Draft([1] * 9, 0.95)], times, 4) == [3]  # most tokens of a pass
    assert worthwhile([Draft()], times, 16) == [0]
    assert worthwhile([], times, 16) == []


def test_costly_tokens_make_drafts_shorter() -> None:
    draft = Draft([1] * 15, 0.85)
    lengths = [worthwhile([draft], measured(1.0, 0.8, each), 16)[0] for each in (0.05, 0.2, 0.8)]
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_the_likelier_draft_is_longer() -> None:
    times = measured(1.0, 1.0, 0.1)
    short, long = worthwhile([Draft([1] * 9, 0.6), Draft([1] * 9, 0.95)], times, 12)
    assert 0 < short < long
    assert short + long <= 10


@given(
    st.lists(st.tuples(st.integers(0, 15), st.floats(0, 1)), max_size=6),
    st.integers(1, 16),
    st.floats(1e-3, 10), st.floats(0, 10), st.floats(0, 10),
)  # fmt: skip
def test_limits_hold_for_any_times(
    drafts: list[tuple[int, float]], most: int, one: float, fixed: float, each: float
) -> None:
    made = [Draft([1] * count, chance) for count, chance in drafts]
    lengths = worthwhile(made, measured(one, fixed, each), most)
    assert len(lengths) == len(made)
    assert all(0 <= n <= len(draft.tokens) for n, draft in zip(lengths, made, strict=True))
    assert not sum(lengths) or sum(lengths) + len(made) <= most
