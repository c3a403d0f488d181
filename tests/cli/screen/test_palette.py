"""What terminals can show."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from greenroom.cli.screen.palette import Look


def console(encoding: str = "utf-8", **options: object) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, force_terminal=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "look"),
    [
        ({"color_system": "truecolor"}, Look(True, True, True)),
        ({"color_system": "256"}, Look(True, True, True)),
        ({"color_system": "standard"}, Look(False, True, True)),
        ({"color_system": "truecolor", "no_color": True}, Look(False, False, True)),
        ({"color_system": None}, Look(False, False, True)),
        ({"color_system": "truecolor", "encoding": "ascii"}, Look(False, True, False)),
    ],
)
def test_what_a_terminal_can_show(options: dict[str, str], look: Look) -> None:
    assert Look.of(console(**options)) == look  # type: ignore[arg-type]
