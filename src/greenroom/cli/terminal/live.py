"""A line at the bottom of the terminal that says what the cache is doing."""

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
    """Keeps the last line of the screen for itself; text scrolls above it.

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
        """Draw the line anew, but not more often than the eye can follow."""
        if self._shown and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            size = os.get_terminal_size(sys.stderr.fileno())
            text = f" {status(self._stats())} "[: size.columns]
            sys.stderr.write(
                f"{SAVE}{self._region(size.lines)}"
                f"\x1b[{size.lines};1H{CLEAR}\x1b[7m{text}\x1b[0m{RESTORE}"
            )
            sys.stderr.flush()

    def _region(self, rows: int) -> str:
        """Keep text out of the last line; again where the window was resized."""
        if rows == self._rows:
            return ""
        self._rows = rows
        return f"\x1b[1;{rows - 1}r"

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write(f"{SAVE}\x1b[r\x1b[{self._rows};1H{CLEAR}{RESTORE}")
            sys.stderr.flush()


def status(stats: Stats) -> str:
    """What the cache holds and what it cost so far."""
    return " · ".join(
        (
            f"{stats.capacity} of {stats.experts} experts in slots",
            f"hit ratio {stats.hit_ratio:.1%}",
            f"waited {stats.stall_s:.2f} s",
            *prefetched(stats),
            f"{show_bytes(stats.bytes_read)} read",
        )
    )


def prefetched(stats: Stats) -> list[str]:
    """What became of the prefetches; nothing where there were none."""
    did = stats.prefetch
    if not did["began"]:
        return []
    late = f", {did['late']:,} late" if did["late"] else ""
    return [f"{did['useful']:,} of {did['began']:,} prefetches used{late}"]
