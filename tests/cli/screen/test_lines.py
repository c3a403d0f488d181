"""Lines of the live screen: widths in cells, bars, charts and wrapped text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from greenroom.cli.screen.lines import (
    ASCII,
    bar,
    columns,
    fit,
    flow,
    join,
    join_blocks,
    length,
    line_of,
    safe,
    spread,
    wrap,
)
from tests.cli.screen.rig import texts


def test_lines_are_cut_and_filled() -> None:
    line = line_of("ab", "", "cd")
    assert texts([fit(line, 3)]) == ["abc"]
    assert [segment.text for segment in fit(line, 6)] == ["ab", "cd", "  "]
    assert length(fit(line_of("a漢字"), 4)) == 4  # half of a wide character has no room
    assert length(fit(line, 0)) == 0


def test_the_left_line_makes_room_for_the_right_one() -> None:
    left, right = line_of("left side"), line_of("right")
    assert texts([spread(left, right, 17)]) == ["left side   right"]
    assert texts([spread(left, right, 10)]) == ["left right"]
    assert texts([spread(left, right, 6)]) == ["left s"]


def test_items_flow_to_the_next_line() -> None:
    items = [line_of("one"), line_of("two"), line_of("three")]
    assert texts(flow(items, 8)) == ["one  two", "three"]
    assert texts([join(items, 8), join([], 8)]) == ["one  two", ""]
    assert texts(flow(items, 2)) == ["one", "two", "three"]


def test_blocks_beside_each_other() -> None:
    short, long = [line_of("ab")], [line_of("c"), line_of("d")]
    assert texts(join_blocks([(short, 2), (long, 1)], "|")) == ["ab|c", "  |d"]


@pytest.mark.parametrize(
    ("share", "text"), [(0, "    "), (0.5, "██  "), (1 / 32, "▏   "), (1, "████"), (9, "████")]
)
def test_bars(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_charts_have_a_column_for_each_value() -> None:
    assert columns([None, 0, 1e-9, 4, 5, 8, 99], 8, 1) == ["  ▁▄▅██"]
    assert columns([2, 4, 6, 8], 8, 2) == ["  ▄█", "▄███"]
    assert columns([1], 1, 0) == []


def test_text_is_broken_at_spaces() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("one\n\ntwo", 7) == ["one", "", "two"]
    assert wrap("a  b", 7) == ["a  b"]
    assert wrap("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert wrap("a bcdefgh i", 4) == ["a", "bcde", "fgh", "i"]
    assert wrap("漢字漢", 4) == ["漢字", "漢"]
    assert wrap("漢", 1) == ["漢", ""]  # there is no better way


@given(st.text("ab 漢\n", max_size=60), st.integers(2, 12))
def test_wrapped_lines_fit_and_keep_the_text(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    kept = "".join(lines).replace(" ", "")
    assert kept == text.replace(" ", "").replace("\n", "")


def test_a_text_cannot_speak_to_the_terminal() -> None:
    assert safe("a\x1b]0;title\x07b\x9bc\tü\n") == "a]0;titlebc    ü\n"


def test_ascii_has_a_character_for_each_of_ours() -> None:
    assert "· • ○ ● ■ █ ▌ ▁ ▄ ▇ ▓ → × ─ –".translate(ASCII).isascii()
