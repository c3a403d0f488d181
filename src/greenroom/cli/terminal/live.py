"""A status line of the expert cache, in the last line of the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from greenroom.config import show_bytes
from greenroom.runtime.driver.stats import Stats

EVERY_S = 0.1
SAVE, RESTORE, CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class LiveLine:
    """A status line of the expert cache in the terminal's last line; text scrolls above it.

    The line is shown only if standard output and standard error are both a terminal.
    """

    def __init__(self, stats: Callable[[], Stats], shown: bool) -> None:
        self._stats = stats
        self._shown = shown and sys.stderr.isatty() and sys.stdout.isatty()
        self._due = 0.0
        self._rows = 0

    def __enter__(self) -> LiveLine:
        if self._shown:
            sys.stderr.write("\n\x1b[1A")  # make room below, and return to where we were
            self.update()
        return self

    def update(self) -> None:
        """Redraw the status line, at most every 0.1 seconds."""
        if self._shown and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            size = os.get_terminal_size(sys.stderr.fileno())
            text = f" {status(self._stats())} "[: size.columns]
            sys.stderr.write(
                f"{SAVE}{self._scroll_area(size.lines)}"
                f"\x1b[{size.lines};1H{CLEAR}\x1b[7m{text}\x1b[0m{RESTORE}"
            )
            sys.stderr.flush()

    def _scroll_area(self, rows: int) -> str:
        """Return the escape sequence that keeps text out of the last of `rows` lines.

        It is empty if the window still has as many lines as before.
        """
        if rows == self._rows:
            return ""
        self._rows = rows
        return f"\x1b[1;{rows - 1}r"

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write(f"{SAVE}\x1b[r\x1b[{self._rows};1H{CLEAR}{RESTORE}")
            sys.stderr.flush()


def status(stats: Stats) -> str:
    """Return a status line of the expert cache: slots, hits, stalls, prefetches, bytes read."""
    return " · ".join(
        (
            f"{stats.capacity} of {stats.experts} experts in slots",
            f"hit ratio {stats.hit_ratio:.1%}",
            f"stalled {stats.stall_s:.2f} s",
            *prefetched(stats),
            f"{show_bytes(stats.bytes_read)} read",
        )
    )


def prefetched(stats: Stats) -> list[str]:
    """Return a list with one text that counts prefetches; empty if there were none."""
    counts = stats.prefetch
    if not counts["began"]:
        return []
    late = f", {counts['late']:,} late" if counts["late"] else ""
    return [f"{counts['useful']:,} of {counts['began']:,} prefetches used{late}"]
