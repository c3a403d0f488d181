from __future__ import annotations

from greenroom.core.cost import Work


def test_work_lies_on_lines_between_points_and_grows_in_proportion_after_them():
    work = Work(((2, 1.0), (4, 3.0), (8, 5.0)))
    assert [work.seconds(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2, 3, 4, 5, 10]


def test_constant_work():
    assert [Work.constant(0.5).seconds(n) for n in (1, 7, 10**9)] == [0.5, 0.5, 0.5]
