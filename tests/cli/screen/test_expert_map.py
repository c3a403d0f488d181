"""The map of the live screen, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.cli.screen.expert_map import (
    Fit,
    expert_grid,
    fit_map,
    fold,
    legend,
    map_lines,
    side_titles,
    starts,
)
from greenroom.cli.screen.history import LayerTotals
from greenroom.cli.screen.lines import length
from greenroom.cli.screen.palette import (
    ABSENT,
    AHEAD,
    FLIGHT,
    RESIDENT,
    USED,
    Look,
    cell_style,
    rgb,
)
from tests.cli.screen.rig import snapshot, texts

SHADES, CHARACTERS = Look(), Look(shades=False)
NOTHING = LayerTotals([0, 0, 0], [0, 0, 0], [0.0, 0.0, 0.0])
STATES = np.array([3, 0, 1, 2, 3, 3, 0, 0])  # layers of 4, 3 and 1 experts
SIZES = (4, 3, 1)


def number(colour: str) -> int:
    red, green, blue = rgb(colour)
    return red << 16 | green << 8 | blue


def rounded(code: int) -> int:
    """A colour as a mean has it: its parts are multiples of 8."""
    parts = [min(255, 8 * round(part / 8)) for part in (code >> 16, code >> 8 & 255, code & 255)]
    return parts[0] << 16 | parts[1] << 8 | parts[2]


@pytest.mark.parametrize(
    ("layers", "experts", "width", "height", "look", "form"),
    [
        (8, 32, 80, 10, SHADES, Fit(2, 6, 2, 8, 32, 1, False)),
        (16, 64, 80, 16, SHADES, Fit(3, 6, 1, 16, 64, 1, False)),
        (16, 64, 200, 20, SHADES, Fit(3, 11, 2, 16, 64, 1, False)),
        (4, 4, 60, 9, SHADES, Fit(2, 11, 3, 4, 4, 1, False)),
        (16, 64, 80, 9, SHADES, Fit(3, 6, 1, 16, 64, 2, False)),
        (94, 128, 80, 8, SHADES, Fit(3, 6, 1, 16, 65, 2, True)),
        (94, 128, 80, 8, CHARACTERS, Fit(3, 6, 1, 8, 65, 1, True)),
        (94, 128, 1, 0, SHADES, Fit(3, 11, 1, 1, 1, 2, True)),
    ],
)
def test_a_map_fits_its_room(
    layers: int, experts: int, width: int, height: int, look: Look, form: Fit
) -> None:
    assert fit_map(layers, experts, width, height, look) == form


def test_groups_are_as_equal_as_possible() -> None:
    assert starts(8, 3).tolist() == [0, 2, 5]
    assert starts(3, 3).tolist() == [0, 1, 2]


def test_the_grid_has_no_experts_where_a_layer_has_fewer() -> None:
    assert expert_grid(SIZES).tolist() == [[0, 1, 2, 3], [4, 5, 6, -1], [7, -1, -1, -1]]


def test_means_leave_out_what_is_not_there() -> None:
    values = np.array([[1.0, 3.0, 5.0], [3.0, np.nan, np.nan]])[..., None]
    assert fold(values, 1, 2)[..., 0].tolist() == [[2.0, 4.0]]  # groups of 1 and 2 columns
    assert np.isnan(fold(values[1:, 1:], 1, 1)).all()


def test_a_row_a_layer_with_a_dot_where_an_expert_was_just_used() -> None:
    uses = np.array([8, 0, 8, 0, 2, 1, 0, 0])
    used = np.array([True, *[False] * 7])
    cache = snapshot(SIZES, states=STATES, uses=uses, used=used)
    lines = map_lines(SIZES, cache, NOTHING, 30, 3, SHADES)
    assert [length(line) for line in lines] == [30] * 3
    assert texts(lines) == ["0 •", "1", "2"]
    cells = [[segment.style for segment in line[1:5]] for line in lines]
    mean_twice = RESIDENT[4]  # two levels above the mean are one shade
    assert cells[0][:3] == [
        cell_style(number(USED), number(mean_twice)), cell_style(-1, number(ABSENT[0])),
        cell_style(-1, number(FLIGHT)),
    ]  # fmt: skip
    assert cells[1][0] == cell_style(-1, number(RESIDENT[4]))
    assert cells[1][3] == cell_style(-1, -1)


def test_half_blocks_where_there_are_more_layers_than_rows() -> None:
    cache = snapshot(SIZES, states=STATES)
    lines = map_lines(SIZES, cache, NOTHING, 18, 2, SHADES)
    assert texts(lines) == ["0  ▀▀▀", "2 ▀"]  # two experts in memory have one colour
    never = number(RESIDENT[0]), number(ABSENT[0])
    same, both, _, over = lines[0][1:5]
    assert same.style == cell_style(rounded(never[0]), rounded(never[0]))
    assert both.style == cell_style(rounded(never[1]), rounded(never[0]))
    assert over.style == cell_style(rounded(number(AHEAD)), -1)  # layer 1 has three experts
    assert lines[1][1].style == cell_style(rounded(never[1]), -1)  # and there is no layer 3
    assert [length(line) for line in lines] == [18] * 2


def test_characters_where_there_are_no_shades() -> None:
    used = np.array([False] * 6 + [True, False])
    cache = snapshot(SIZES, states=STATES, used=used)
    lines = map_lines(SIZES, cache, NOTHING, 18, 3, CHARACTERS)
    assert texts(lines) == ["0 ○·↓+", "1 ○○●", "2 ·"]
    folded = map_lines(SIZES, cache, NOTHING, 16, 1, CHARACTERS)
    assert texts(folded) == ["0 ▅"]  # 3 of 5 experts that there are, and 0 of 3


def test_misses_and_stalls_are_beside_their_layers() -> None:
    totals = LayerTotals([3, 0, 0], [1, 5, 0], [0.5, 1.0, 0.0])
    cache = snapshot(SIZES, states=STATES)
    wide = map_lines(SIZES, cache, totals, 48, 3, CHARACTERS)
    assert texts(wide)[0].split() == ["0", "○", "·", "↓", "+", "25%", "█", "500ms", "██"]
    assert texts(wide)[1].split()[-4:] == ["100%", "████", "1.0s", "████"]
    assert texts(wide)[2].split() == ["2", "·"]
    both = map_lines(SIZES, cache, totals, 18, 2, SHADES)
    assert texts(both)[0].split()[-2:] == ["67%", "750ms"]  # 6 of 9; the mean of two stalls
    assert texts([side_titles(3, 4, 48, 3, SHADES)]) == ["     misses     stalls"]
    assert texts([side_titles(3, 4, 18, 3, SHADES)]) == ["  miss stall"]


def test_the_legend_explains_what_is_shown() -> None:
    def words(form: Fit, look: Look) -> str:
        return " ".join(texts(legend(form, look)))

    exact, folded = Fit(2, 6, 1, 8, 32, 1, False), Fit(2, 6, 1, 8, 16, 2, True)
    assert words(exact, SHADES).startswith("■ in memory ■ being read ■ read ahead ■ on disk")
    assert "• just used" in words(exact, SHADES)
    assert "■ just used" in words(folded, SHADES)
    assert "cells are means" in words(folded, SHADES)
    assert words(exact, CHARACTERS).startswith("○ in memory ↓ being read")
    assert "● just used" in words(exact, CHARACTERS)
    assert words(folded, CHARACTERS) == "▁▄█ share in memory cells are means"
