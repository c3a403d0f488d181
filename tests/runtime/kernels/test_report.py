"""Reports of look-ups: a token's experts in a layer, and those that were in no slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime.kernels.report import TokenReport, read_token

NUMBER, FIRST, EXPERTS = 5, 100, 8


def report_of(choices: Sequence[tuple[int, bool]], number: int = NUMBER) -> np.ndarray:
    """What a look-up reports of (expert, whether it was in a slot)."""
    return np.array([number << 32 | expert << 1 | there for expert, there in choices], np.int64)


def read(report: np.ndarray) -> TokenReport | None:
    return read_token(report, NUMBER, FIRST, EXPERTS)


def test_a_report_is_read_when_all_of_its_numbers_are_there() -> None:
    report = report_of([(3, True), (1, False), (6, True)])
    for rank in range(3):
        part = report.copy()
        part[rank] = report_of([(7, True)], NUMBER - 1)[0]
        assert read(part) is None
    found = read(report)
    assert found is not None
    assert found.pieces.tolist() == [101, 103, 106]
    assert found.misses == 1
    assert found.missing == [1]
    assert found.by_rank.tolist() == [3, 1, 6]


def test_a_report_says_nothing_of_later_tokens() -> None:
    """The next look-up writes to the same memory."""
    report = report_of([(3, True), (1, False)])
    found = read(report)
    report[:] = report_of([(7, False), (2, False)], NUMBER + 1)
    assert found is not None
    assert found.pieces.tolist() == [101, 103]
    assert found.by_rank.tolist() == [3, 1]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, EXPERTS + 3), st.booleans()), min_size=1, max_size=12))
def test_experts_of_the_layer_are_listed_once_and_ascending(choices):
    """Experts of other processes have greater numbers; one may be chosen twice."""
    found = read(report_of(choices))
    assert found is not None
    here = [(expert, there) for expert, there in choices if expert < EXPERTS]
    assert found.pieces.tolist() == sorted({FIRST + expert for expert, _ in here})
    assert found.missing == [expert for expert, there in here if not there]
    assert found.misses == len(found.missing)
    assert found.by_rank.tolist() == [expert for expert, _ in choices]
