"""The live screen's arrangement of its parts for a terminal's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from greenroom.cli.screen import panels
from greenroom.cli.screen.expert_map import fit_map, legend, map_lines, side_titles
from greenroom.cli.screen.frame import ModelFacts
from greenroom.cli.screen.history import History
from greenroom.cli.screen.lines import Line, fit, heading, join, join_blocks, line_of, spread
from greenroom.cli.screen.palette import DIM, Look

TEXT_COLUMN_WIDTH = 110  # columns from which the text is beside the numbers
TEXT_SHARE, TEXT_LEAST, TEXT_MOST = 0.3, 36, 80  # columns of the text beside the numbers
FEWEST = 4  # lines of the text, its title included, and of the map with its two
MAP_SHARE = 0.6  # of the lines with numbers, which the map has first
TALL, TALLER = 34, 50  # lines from which charts are higher

Text = Sequence[tuple[str, bool]]


@dataclass(slots=True)
class View:
    """Content of the live screen: a model's facts, its frames, and the text so far."""

    facts: ModelFacts
    history: History = field(default_factory=History)
    text: list[tuple[str, bool]] = field(default_factory=list)


def draw(view: View, width: int, height: int, look: Look) -> list[Line]:
    """Return the lines of a screen, `height` lines of `width` cells."""
    charts = 2 + (height >= TALL) + 2 * (height >= TALLER)
    top = [panels.title_line(view.facts, view.history, width)]
    if height >= TALL:
        top.append([])
    top += panels.tiles(view.history, width, charts)
    room = height - len(top)
    if width >= TEXT_COLUMN_WIDTH and room > FEWEST:
        wide = min(TEXT_MOST, max(TEXT_LEAST, round(TEXT_SHARE * width)))
        left = width - wide - 3
        numbers = _numbers(view, left, room - 1, look)
        text = [fit(heading("Text"), wide), *panels.answer(view.text, wide, room - 2)]
        numbers += [[]] * (room - 1 - len(numbers))
        lines = [*top, [], *join_blocks([(numbers, left), (text, wide)], " │ ")]
    else:
        numbers = _numbers(view, width, room - FEWEST, look) if room > FEWEST else []
        lines = [*top, *numbers]
        left = height - len(lines)
        if left > 1:
            title = line_of(("─ Text " + "─" * width, DIM))
            lines += [title, *panels.answer(view.text, width, left - 1)]
    lines = [fit(line, width) for line in lines[:height]]
    return lines + [fit([], width) for _ in range(height - len(lines))]


def _numbers(view: View, width: int, height: int, look: Look) -> list[Line]:
    """Return the map and the numbers below it, in at most `height` lines."""
    facts, history = view.facts, view.history
    below: list[list[Line]] = []
    least = min(len(facts.layers) + 2, max(FEWEST, round(MAP_SHARE * height)))
    room = height
    for block in (
        panels.memory(history, width, look),
        panels.links(facts, history, width),
        panels.prefetching(facts, history, width),
    ):
        if block := block[: max(0, room - least)]:
            below.append(block)
            room -= len(block)
    lines = _experts(view, width, room, look) if room >= FEWEST else []
    spare = height - len(lines) - sum(map(len, below))
    for place, block in enumerate(below):
        lines += [[]] if spare >= len(below) - place else []
        lines += block
    return lines


def _experts(view: View, width: int, height: int, look: Look) -> list[Line]:
    """Return the map with its heading and its legend, in at most `height` lines."""
    facts, cache = view.facts, view.history.last.cache
    layers, most, total = len(facts.layers), max(facts.layers), sum(facts.layers)
    form = fit_map(layers, most, width, height - 2, look)
    note = (
        f"{min(cache.present, total):,} of {total:,} in memory, in {cache.capacity:,} slots"
        f" ({cache.capacity / total:.0%})"
    )
    titles = side_titles(layers, most, width, height - 2, look)
    rows = map_lines(facts.layers, cache, view.history.layers(), width, height - 2, look)
    return [
        spread(heading("Experts", note), titles, width),
        *rows,
        fit([*line_of(" " * form.gutter), *join(legend(form, look), width - form.gutter)], width),
    ]
