"""The live screen: drawn by a thread on the terminal's second buffer while an answer is generated.

When it ends, however that is, the terminal is as it was, and the text is written to it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from greenroom.cli.screen.frame import Frame
from greenroom.cli.screen.layout import View, draw
from greenroom.cli.screen.lines import ASCII, Line
from greenroom.cli.screen.palette import PLAIN, Look
from greenroom.cli.screen.screen_mode import ScreenMode
from greenroom.interrupts import defer_interrupts

EVERY_S = 0.25  # between two frames
SHARE = 0.05  # the most of the time that frames take; they come less often where they take more
CLEAR = "\x1b[2J"
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"  # the terminal shows a frame at once, if it can
SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
}

NO_TERMINAL = "--live needs a terminal: this is plain text"

OnText = Callable[[str, bool], None]


def has_terminal() -> bool:
    """Tell whether standard output is a terminal on which a screen can be drawn."""
    return sys.stdout.isatty() and not Console(file=sys.stdout).is_dumb_terminal


class LiveScreen:
    """Shows a model's frames and the text of an answer on the whole terminal.

    read:    returns a frame; a thread calls it
    on_text: gets the whole text when the screen has ended, in parts; a part may be reasoning
    """

    def __init__(self, view: View, read: Callable[[], Frame], on_text: OnText) -> None:
        self._view, self._read, self._on_text = view, read, on_text
        self._mode = ScreenMode(sys.stdout)
        self._painter = Painter(Console(file=sys.stdout), self._mode)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live-screen", daemon=True)
        self._failure: BaseException | None = None
        self._errors, self._stderr = io.StringIO(), sys.stderr

    def __enter__(self) -> LiveScreen:
        self._view.text = []
        try:
            with defer_interrupts():
                self._mode.enter()
                if sys.stderr.isatty():  # messages would be drawn over
                    sys.stderr = self._errors
                self._thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def write(self, text: str, reasoning: bool = False) -> None:
        """Add a part of the answer to the screen."""
        parts = self._view.text
        if parts and parts[-1][1] == reasoning:
            parts[-1] = parts[-1][0] + text, reasoning
        else:
            parts.append((text, reasoning))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with defer_interrupts():
            self._end()
        if kind is None and self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        """End the thread, restore the terminal, and write text and messages to it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._mode.leave()
        sys.stderr = self._stderr
        for text, reasoning in self._view.text:
            self._on_text(text, reasoning)
        self._stderr.write(self._errors.getvalue())
        self._stderr.flush()

    def _draw(self) -> None:
        try:
            while not self._stopped.is_set():
                began = time.perf_counter()
                self._view.history.add(self._read())
                self._painter.paint(self._view)
                took = time.perf_counter() - began
                self._stopped.wait(max(EVERY_S - took, took * (1 / SHARE - 1)))
        except BaseException as error:
            self._failure = error


class Painter:
    """Draws lines on a terminal: those that have changed, or all after a change of its size."""

    def __init__(self, console: Console, mode: ScreenMode) -> None:
        self._console, self._mode, self.look = console, mode, Look.of(console)
        self._system = SYSTEMS.get(console.color_system or "")
        self._shown: list[str] = []
        self._state = (0, (0, 0))  # number of the screen, and the terminal's size
        self._styles: dict[Style, Style] = {}

    def paint(self, view: View) -> None:
        """Draw a view in the terminal's present size."""
        size = self._terminal_size()
        lines = [self._encode(line) for line in draw(view, *size, self.look)]
        out = [BEGIN]
        if (state := (self._mode.begun, size)) != self._state:
            self._state, self._shown = state, [""] * len(lines)
            out.append(CLEAR)
        for row, (text, before) in enumerate(zip(lines, self._shown, strict=True)):
            if text != before:
                out.append(f"\x1b[{row + 1};1H{text}")
        self._shown = lines
        self._mode.write("".join([*out, END]))

    def _terminal_size(self) -> tuple[int, int]:
        """Return the terminal's columns and lines now, whatever COLUMNS and LINES were."""
        with contextlib.suppress(OSError):  # the file is not the terminal itself
            columns, lines = os.get_terminal_size(self._console.file.fileno())
            if columns and lines:
                return columns, lines
        return self._console.size

    def _encode(self, line: Line) -> str:
        text = "".join(
            self._style(segment.style or PLAIN).render(segment.text, color_system=self._system)
            for segment in line
        )
        return text if self.look.unicode else text.translate(ASCII)

    def _style(self, style: Style) -> Style:
        """Return a style as the terminal can show it: without colours where the user wants none."""
        if self.look.colour:
            return style
        if style not in self._styles:
            self._styles[style] = style.without_color
        return self._styles[style]
