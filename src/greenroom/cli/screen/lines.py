"""Lines of the live screen: text in styles, bars and charts, cut to a width in cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from greenroom.cli.screen.palette import BOLD, DIM, PLAIN

Line = list[Segment]
Part = str | tuple[str, Style]

EIGHTHS = " ▁▂▃▄▅▆▇█"
ACROSS = " ▏▎▍▌▋▊▉█"
DOTS = " · "
ASCII = str.maketrans(
    "·•○●■█▉▊▋▌▍▎▏▁▂▃▄▅▆▇▓▒░→↓×─│–",
    ".*o####" "##++--" "__--==#" "%+.>vx-|-",
)  # fmt: skip


def line_of(*parts: Part) -> Line:
    """Make a line of texts; a part is a text, or a text and its style."""
    return [
        Segment(part, PLAIN) if isinstance(part, str) else Segment(*part) for part in parts if part
    ]


def length(line: Line) -> int:
    """Return a line's width in cells."""
    return sum(cell_len(segment.text) for segment in line)


def fit(line: Line, width: int) -> Line:
    """Cut a line, or add spaces, so that it has exactly `width` cells."""
    out, room = [], max(0, width)
    for segment in line:
        size = cell_len(segment.text)
        if size > room:
            out.append(Segment(set_cell_size(segment.text, room), segment.style))
            return out
        out.append(segment)
        room -= size
    if room:
        out.append(Segment(" " * room, PLAIN))
    return out


def spread(left: Line, right: Line, width: int) -> Line:
    """Put one line at the left and another at the right; the left one is cut where it must."""
    reserved = length(right)
    if reserved + 2 > width:
        return fit(left, width)
    return [*fit(left, width - reserved - 1), Segment(" ", PLAIN), *right]


def heading(title: str, note: str = "") -> Line:
    """Make the line that begins a part of the screen."""
    return line_of((title, BOLD), ("  " + note, DIM) if note else "")


def join(items: Sequence[Line], width: int) -> Line:
    """Join as many of the items as fit, with two spaces between them."""
    return flow(items, width)[0] if items else []


def flow(items: Sequence[Line], width: int) -> list[Line]:
    """Join items to lines of at most `width` cells, with two spaces between them.

    An item that is wider has a line of its own.
    """
    lines: list[Line] = []
    for item in items:
        if lines and length(lines[-1]) + 2 + length(item) <= width:
            lines[-1] += [Segment("  ", PLAIN), *item]
        else:
            lines.append([*item])
    return lines


def join_blocks(blocks: Sequence[tuple[list[Line], int]], gap: str) -> list[Line]:
    """Put blocks of lines beside each other; a block's lines have its width, or are empty."""
    lines = []
    for row in zip_longest(*(block for block, _ in blocks), fillvalue=None):
        line: Line = []
        for number, (part, (_, width)) in enumerate(zip(row, blocks, strict=True)):
            line += [Segment(gap, DIM)] if number else []
            line += part or [Segment(" " * width, PLAIN)]
        lines.append(line)
    return lines


def bar(share: float, width: int) -> str:
    """Return a horizontal bar of eighths of cells."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, part = divmod(eighths, 8)
    return ("█" * full + (ACROSS[part] if part else "")).ljust(width)


def columns(values: Sequence[float | None], top: float, height: int) -> list[str]:
    """Return the rows of a chart with a column for each value.

    Columns have at most `height` cells. A value above 0 has at least an eighth of a cell; None
    leaves its column empty.
    """
    eighths = [
        0 if value is None or value <= 0 else max(1, round(8 * height * min(1.0, value / top)))
        for value in values
    ]
    return [
        "".join(EIGHTHS[min(8, max(0, each - 8 * below))] for each in eighths)
        for below in reversed(range(height))
    ]


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` cells, at spaces where possible."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, room = "", width
        for word in paragraph.split(" "):
            size = cell_len(word)
            if line and size + 1 > room:
                lines.append(line)
                line, room = "", width
            while size > width:
                head = _head(word, width)
                lines.append(head)
                word = word[len(head) :]
                size = cell_len(word)
            line, room = (f"{line} {word}", room - size - 1) if line else (word, room - size)
        lines.append(line)
    return lines


def _head(word: str, width: int) -> str:
    """Return the longest beginning of a word that has at most `width` cells, never empty."""
    size = 0
    for place, character in enumerate(word):
        size += cell_len(character)
        if size > width:
            return word[: max(1, place)]
    return word


def safe(text: str) -> str:
    """Remove control characters, which a terminal would obey; tabs become spaces."""
    text = text.replace("\t", "    ")
    return "".join(c for c in text if c == "\n" or (c >= " " and not "\x7f" <= c <= "\x9f"))
