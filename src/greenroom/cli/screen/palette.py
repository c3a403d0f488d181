"""Colours of the live screen, those of the live page in the dark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.console import Console
from rich.style import Style

from greenroom.core.scheduler.view import ExpertState

ABSENT = "#222529", "#282b2f", "#2e3136", "#36393f", "#40444a", "#4d5158"
RESIDENT = "#1d3249", "#1e3f60", "#20558a", "#2c74b8", "#549ddb", "#9ccbf4"
FLIGHT, AHEAD, USED = "#ff6f47", "#31c493", "#ffd75e"
SHADES = len(RESIDENT)  # from never used to used most
RICH_COLOURS = "256", "truecolor"  # systems that have the shades of the map

PLAIN = Style.null()
BOLD, DIM = Style(bold=True), Style(dim=True)
SPEED, TTFT = Style.parse("#5b93e6"), Style.parse("#e0803f")
RATIO, WAITS = Style.parse("#2fae85"), Style.parse("#a878e0")
MISSES, STALLS = TTFT, WAITS
GREY = Style.parse("#6b7078")
MEMORY = SPEED, TTFT, RATIO, WAITS, GREY  # slots, dense, keys and values, buffers, the rest


@dataclass(frozen=True, slots=True)
class Look:
    """Abilities of a terminal: shades of colours in cells, colours at all, and Unicode."""

    shades: bool = True
    colour: bool = True
    unicode: bool = True

    @classmethod
    def of(cls, console: Console) -> Look:
        colour = console.color_system is not None and not console.no_color
        unicode = console.encoding.lower().startswith("utf")
        return cls(unicode and colour and console.color_system in RICH_COLOURS, colour, unicode)


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the parts of a colour that is written as "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def expert_colours() -> NDArray[np.float64]:
    """Return the colours of experts by state and shade, [states, SHADES, 3]."""
    table = np.zeros((len(ExpertState), SHADES, 3))
    table[ExpertState.ABSENT] = [rgb(each) for each in ABSENT]
    table[ExpertState.RESIDENT] = [rgb(each) for each in RESIDENT]
    table[ExpertState.IN_FLIGHT] = rgb(FLIGHT)
    table[ExpertState.PREFETCHED] = rgb(AHEAD)
    return table


@lru_cache(8192)
def cell_style(front: int, back: int) -> Style:
    """Return the style of a cell with two colours (0xrrggbb); -1 is the terminal's own."""
    return Style(color=_colour(front), bgcolor=_colour(back))


def _colour(value: int) -> Color | None:
    return None if value < 0 else Color.from_rgb(value >> 16, value >> 8 & 255, value & 255)
