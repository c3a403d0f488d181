"""The map of layers and experts: a row a layer, a column an expert, folded where it must be.

Where each layer has a row, a cell has the colour of its expert's state, and a dot if the expert was
just used. Otherwise a row has two layers in half blocks, or two groups of layers, and a cell has
the mean colour of its experts. Terminals without shades of colours get characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style

from greenroom.cli.screen.history import LayerTotals
from greenroom.cli.screen.lines import EIGHTHS, Line, bar, line_of
from greenroom.cli.screen.palette import (
    AHEAD,
    DIM,
    FLIGHT,
    GREY,
    MISSES,
    PLAIN,
    RESIDENT,
    SHADES,
    STALLS,
    USED,
    Look,
    cell_style,
    expert_colours,
    rgb,
)
from greenroom.core.scheduler.view import ExpertState
from greenroom.drawing.frames import MIDDLE, PER_OCTAVE, use_levels
from greenroom.hf.attach.snapshot import CacheSnapshot

Grid = NDArray[np.int64]
SIDES = 11, 6  # cells of misses, and of stalls; the narrower where more experts fit so
WIDEST = 3  # cells of an expert
NONE = -1  # in a grid: no expert there
BLEND = 0.75  # of the mark's colour in an expert that was just used, where no dot has room
COARSE = 8  # of mean colours, so that there are few
# Where a terminal has no shades of colours: of a state, and of an expert that was just used.
CHARACTERS = {
    ExpertState.ABSENT: ("·", DIM),
    ExpertState.IN_FLIGHT: ("↓", Style(color="red")),
    ExpertState.PREFETCHED: ("+", Style(color="green")),
    ExpertState.RESIDENT: ("○", Style(color="blue")),
}
USED_CHARACTER = ("●", Style(color="yellow"))


@dataclass(frozen=True, slots=True)
class Fit:
    """How a map fits its room.

    gutter, side:   cells of the layers' numbers, of misses, and of stalls
    wide:           cells of a column
    bands, columns: groups of layers, and of experts; one each where there is room
    halves:         bands in a row: 1 or 2
    folded:         whether a group has several members
    """

    gutter: int
    side: int
    wide: int
    bands: int
    columns: int
    halves: int
    folded: bool

    @property
    def rows(self) -> int:
        return -(-self.bands // self.halves)


def fit_map(layers: int, experts: int, width: int, height: int, look: Look) -> Fit:
    """Choose how a map of layers x experts fits into a width and a height."""
    gutter = len(str(layers - 1)) + 1
    choices = []
    for side in SIDES:
        room = max(1, width - gutter - 2 * side)
        choices.append((min(room, experts), min(WIDEST, room // experts), side))
    columns, wide, side = max(choices)  # as little folded, then as wide, as possible
    halves = 2 if look.shades and layers > height else 1
    bands = min(layers, max(1, halves * height))
    folded = bands < layers or columns < experts
    return Fit(gutter, side, max(1, wide), bands, columns, halves, folded)


def starts(items: int, groups: int) -> Grid:
    """Return the first item of each group, where groups are as equal as possible."""
    return np.arange(groups) * items // groups


def map_lines(
    sizes: tuple[int, ...], cache: CacheSnapshot, totals: LayerTotals, width: int, height: int,
    look: Look,
) -> list[Line]:  # fmt: skip
    """Return the rows of the map, with each row's misses and stalls at its right."""
    layers, experts = len(sizes), max(sizes)
    form = fit_map(layers, experts, width, height, look)
    room = max(0, width - form.gutter - 2 * form.side)
    ids = expert_grid(sizes)
    if not look.shades:
        cells = _character_rows(ids, cache, form)
    elif form.folded or form.halves > 1:
        cells = _mean_rows(ids, cache, form)
    else:
        cells = _exact_rows(ids, cache, form)
    first = starts(layers, form.bands)[:: form.halves]
    sides = _sides(totals, first, form.side)
    space = Segment(" " * (room - form.columns * form.wide), PLAIN)
    return [
        [Segment(f"{layer:>{form.gutter - 1}} ", DIM), *row, space, *side]
        for layer, row, side in zip(first.tolist(), cells, sides, strict=True)
    ]


def side_titles(layers: int, experts: int, width: int, height: int, look: Look) -> Line:
    """Return the titles of the columns at the map's right."""
    side = fit_map(layers, experts, width, height, look).side
    misses, stalls = ("misses", "stalls") if side == SIDES[0] else ("miss", "stall")
    return line_of((f"{misses:>{side}}", MISSES), (f"{stalls:>{side}}", STALLS))


def legend(form: Fit, look: Look) -> list[Line]:
    """Return the items that explain the map, the most important first."""
    if look.shades:
        marks = [("■", Style.parse(RESIDENT[3])), ("■", Style.parse(FLIGHT)),
                 ("■", Style.parse(AHEAD)), ("■", GREY)]  # fmt: skip
    elif not form.folded:
        order = (ExpertState.RESIDENT, ExpertState.IN_FLIGHT, ExpertState.PREFETCHED,
                 ExpertState.ABSENT)  # fmt: skip
        marks = [CHARACTERS[state] for state in order]
    else:
        marks = []
    names = "in memory", "being read", "read ahead", "on disk"
    items = [line_of(mark, f" {name}") for mark, name in zip(marks, names, strict=False)]
    if not marks:
        items.append(line_of("▁▄█ share in memory"))
    if form.folded:
        items.append(line_of(("cells are means", DIM)))
    used = ("■" if look.shades and form.halves > 1 else "•", Style.parse(USED))
    if look.shades:
        items += [line_of(used, " just used"), line_of(("brighter: used more", DIM))]
    elif marks:
        items.append(line_of(USED_CHARACTER, " just used"))
    return items


def expert_grid(sizes: tuple[int, ...]) -> Grid:
    """Return the ids of experts by layer and column; -1 where a layer has fewer."""
    grid = np.full((len(sizes), max(sizes)), NONE, np.int64)
    first = 0
    for layer, size in enumerate(sizes):
        grid[layer, :size] = np.arange(first, first + size)
        first += size
    return grid


def _colours(ids: Grid, cache: CacheSnapshot) -> NDArray[np.float64]:
    """Return each expert's colour by its state and use, [layers, experts, 3]; NaN for none."""
    offsets = np.append(ids[:, 0], cache.uses.size)
    levels = use_levels(cache.uses, offsets).astype(np.int64)
    shades = np.where(levels == 0, 0, np.clip(3 + (levels - MIDDLE) // PER_OCTAVE, 1, SHADES - 1))
    colours = expert_colours()[cache.states, shades]
    return np.where((ids >= 0)[..., None], colours[ids], np.nan)


def _codes(colours: NDArray[np.float64]) -> Grid:
    """Return colours as numbers 0xrrggbb; -1 for NaN."""
    present = ~np.isnan(colours[..., 0])
    parts = np.nan_to_num(colours).round().astype(np.int64)
    codes = parts[..., 0] << 16 | parts[..., 1] << 8 | parts[..., 2]
    return np.where(present, codes, NONE)


def _exact_rows(ids: Grid, cache: CacheSnapshot, form: Fit) -> list[Line]:
    """Return a row a layer, with a dot in experts that were just used."""
    codes = _codes(_colours(ids, cache)).tolist()
    used = (cache.used[ids] & (ids >= 0)).tolist()
    mark, rows = _number(USED), []
    texts = {flag: ("•" if flag else " ").ljust(form.wide) for flag in (False, True)}
    for layer_codes, layer_used in zip(codes, used, strict=True):
        rows.append([
            Segment(texts[flag], cell_style(mark if flag else NONE, code))
            for code, flag in zip(layer_codes, layer_used, strict=True)
        ])  # fmt: skip
    return rows


def _mean_rows(ids: Grid, cache: CacheSnapshot, form: Fit) -> list[Line]:
    """Return rows of cells with the mean colours of their experts, one or two bands a row."""
    colours = _colours(ids, cache)
    used = (cache.used[ids] & (ids >= 0))[..., None]
    colours = np.where(used, (1 - BLEND) * colours + BLEND * np.array(rgb(USED)), colours)
    averages = fold(colours, form.bands, form.columns)
    codes = _codes(np.minimum(255, COARSE * (averages / COARSE).round()))
    if form.halves == 1:
        return [_runs(np.full_like(row, NONE), row, " ", form.wide) for row in codes]
    if len(codes) % 2:
        codes = np.vstack([codes, np.full_like(codes[:1], NONE)])
    return [_runs(*pair, "▀", form.wide) for pair in zip(codes[::2], codes[1::2], strict=True)]


def fold(values: NDArray[np.float64], bands: int, columns: int) -> NDArray[np.float64]:
    """Return means over groups of rows and columns, without NaN; NaN where nothing else is."""
    present = ~np.isnan(values)
    sums: list[NDArray[np.float64]] = []
    for each in (np.where(present, values, 0.0), present.astype(np.float64)):
        rows = np.add.reduceat(each, starts(values.shape[0], bands), 0)
        sums.append(np.add.reduceat(rows, starts(values.shape[1], columns), 1))
    total, count = sums
    return np.where(count > 0, total / np.maximum(1, count), np.nan)


def _runs(top: Grid, bottom: Grid, character: str, wide: int) -> Line:
    """Return a row of cells; neighbours with the same colours are one segment."""
    edges = np.flatnonzero((top[1:] != top[:-1]) | (bottom[1:] != bottom[:-1])) + 1
    places = [0, *edges.tolist(), top.size]
    line = []
    for begin, end in pairwise(places):
        front, back = int(top[begin]), int(bottom[begin])
        text = " " if front == back else character
        line.append(Segment(text * (wide * (end - begin)), cell_style(front, back)))
    return line


def _character_rows(ids: Grid, cache: CacheSnapshot, form: Fit) -> list[Line]:
    """Return rows of characters: states, or shares in memory where cells have several experts."""
    if not form.folded:
        return [_states(row, cache, form.wide) for row in ids]
    resident = (cache.states == ExpertState.RESIDENT).astype(np.float64)
    shares = fold(np.where(ids >= 0, resident[ids], np.nan)[..., None], form.bands, form.columns)
    style = CHARACTERS[ExpertState.RESIDENT][1]
    return [
        [Segment("".join(EIGHTHS[round(8 * share)] for share in row.tolist()), style)]
        for row in np.nan_to_num(shares[..., 0])
    ]


def _states(row: Grid, cache: CacheSnapshot, wide: int) -> Line:
    line = []
    for expert in row.tolist():
        if expert == NONE:
            line.append(Segment(" " * wide, PLAIN))
            continue
        state = ExpertState(int(cache.states[expert]))
        character, style = USED_CHARACTER if cache.used[expert] else CHARACTERS[state]
        line.append(Segment(character.ljust(wide), style))
    return line


def _sides(totals: LayerTotals, first: Grid, side: int) -> list[Line]:
    """Return the share of misses and a layer's mean stall, of the layers of each row."""
    hits, misses, stalls = (
        np.add.reduceat(np.array(values, np.float64), first)
        for values in (totals.hits, totals.misses, totals.stalls)
    )
    shares = misses / np.maximum(1, hits + misses)
    stalls /= np.diff(np.append(first, len(totals.stalls)))
    most = max(float(stalls.max()), 1e-3)
    return [
        [
            *_side(f"{share:.0%}" if all_ else "", share, MISSES, side),
            *_side(_seconds(stall), stall / most, STALLS, side),
        ]
        for share, all_, stall in zip(
            shares.tolist(), (hits + misses).tolist(), stalls.tolist(), strict=True
        )
    ]


def _side(number: str, share: float, style: Style, side: int) -> Line:
    """Return a number of one layer in six cells, and a bar where there are more."""
    if side == SIDES[-1]:
        return line_of((f" {number:>5}", style))
    return line_of(f" {number:>5} ", (bar(share, side - 7), style))


def _seconds(value: float) -> str:
    """Format seconds in at most five cells; none below half a millisecond."""
    if value < 0.0005:
        return ""
    if value < 0.9995:
        return f"{1000 * value:.0f}ms"
    return f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"


def _number(colour: str) -> int:
    red, green, blue = rgb(colour)
    return red << 16 | green << 8 | blue
