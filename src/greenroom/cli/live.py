"""A line at the bottom of the terminal that says what the cache is doing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from greenroom.config import show_bytes
from greenroom.runtime.stats import Stats

EVERY_S = 0.1


class LiveLine:
    """Keeps the last line of the screen for itself; text scrolls above it.

    Where standard error is no terminal it prints the line once, at the end.
    """

    def __init__(self, stats: Callable[[], Stats], shown: bool) -> None:
        self._stats, self._shown = stats, shown
        self._terminal = shown and sys.stderr.isatty() and sys.stdout.isatty()
        self._due = 0.0

    def __enter__(self) -> LiveLine:
        if self._terminal:
            rows = os.get_terminal_size(sys.stderr.fileno()).lines
            self._rows = rows
            # Make room below, keep text out of the last line, return to where we were.
            sys.stderr.write(f"\n\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
            self.update()
        return self

    def update(self) -> None:
        """Draw the line anew, but not more often than the eye can follow."""
        if self._terminal and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            sys.stderr.write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[7m{self.line()}\x1b[0m\x1b8")
            sys.stderr.flush()

    def line(self) -> str:
        stats = self._stats()
        return (
            f" {stats.capacity} of {stats.experts} experts in slots ·"
            f" hit ratio {stats.hit_ratio:.1%} ({stats.expert_hits}/{stats.expert_requests}) ·"
            f" {show_bytes(stats.bytes_read)} read · waited {stats.stall_s:.2f} s "
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal:
            sys.stderr.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            sys.stderr.flush()
        if self._shown and error is None:
            print(f"\n[{self.line().strip()}]", file=sys.stderr)
