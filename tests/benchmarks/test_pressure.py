"""When memory became short, and how long after that slots were given back, by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pressure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose neighbours are imported as in a run of it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import pressure

    yield pressure
    for name in ("pressure", "common", "memlimit"):
        sys.modules.pop(name, None)


def log(free: int, *taken: int) -> list[dict[str, Any]]:
    """A hog that takes a part of its memory each second, from second 100 on."""
    first = {"at": 100.0, "begun": True, "free": free, "taken": 0}
    return [first, *({"at": 101.0 + n, "taken": each} for n, each in enumerate(taken))]


@pytest.mark.parametrize(
    ("free", "reserve", "at"),
    [
        (1000, 300, 103.0),  # 1000 - 800 < 300; at second 102 there are 400 left
        (1000, 400, 103.0),  # 400 left are not less than the reserve
        (1000, 401, 102.0),
        (100, 300, 100.0),  # it was short before
        (5000, 300, None),  # it was never short
        (1000, None, None),  # the run does not watch memory
    ],
)
def test_memory_is_short_when_less_than_the_reserve_is_left(
    pressure: Any, free: int, reserve: int | None, at: float | None
) -> None:
    assert pressure.short_at(log(free, 300, 600, 800), reserve) == at


def figures(pressure: Any, short: float | None, *changes: tuple[float, int, int]) -> Any:
    lines: list[dict[str, Any]] = [{"at": 99.0, "tokens": 1, "slots": 9}]
    lines += [{"at": 104.0, "tokens": 1, "slots": 5}, {"at": 120.0, "changes": [*changes]}]
    first = {"at": 98.0, "slots": 9}
    return pressure.figures(lines, first, (100.0, short, 110.0, 115.0), [])


def test_releases_are_counted_from_both_moments(pressure: Any) -> None:
    shrinks = (99.0, 9, 8), (103.5, 8, 6), (104.0, 6, 5), (112.0, 5, 9)  # the first is earlier
    found = figures(pressure, 103.0, *shrinks)
    assert (found["release"], found["after short"]) == (3.5, 0.5)
    assert figures(pressure, 104.0, *shrinks)["after short"] == -0.5  # before it was short
    assert figures(pressure, None, *shrinks)["after short"] is None
    assert figures(pressure, 103.0)["release"] is None
    assert figures(pressure, 103.0)["after short"] is None


def test_the_line_of_the_table_has_both(pressure: Any) -> None:
    rounds = [figures(pressure, 103.0, (103.5, 9, 5)), figures(pressure, 104.25, (103.75, 9, 5))]
    line = dict(zip(pressure.COLUMNS, pressure.row("on", rounds), strict=True))
    assert line["release s after first byte"] == "3.62"
    assert line["after short"] == "+0.00"
    none = pressure.row("off", [figures(pressure, None)])
    assert none[2:4] == ("-", "-")
