"""A status line of the expert cache at the bottom of the terminal."""

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
    """A status line in the last line of the screen; text scrolls above it.

    Shown only where standard output and standard error are both the terminal.
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
        """Redraw the status line, at most every EVERY_S seconds."""
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
        """Keep text out of the screen's last line; again where the window was resized."""
        if rows == self._rows:
            return ""
        self._rows = rows
        return f"\x1b[1;{rows - 1}r"

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write(f"{SAVE}\x1b[r\x1b[{self._rows};1H{CLEAR}{RESTORE}")
            sys.stderr.flush()


def status(stats: Stats) -> str:
    """Return the expert cache's status line: slots, hit ratio, stalls, prefetches, bytes read."""
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
    """Return counts of prefetches for a status line; nothing where nothing was prefetched."""
    counts = stats.prefetch
    if not counts["began"]:
        return []
    late = f", {counts['late']:,} late" if counts["late"] else ""
    return [f"{counts['useful']:,} of {counts['began']:,} prefetches used{late}"]
