"""Turns of other readers and writers of the disk from which experts are read.

A second reader must not delay a layer that waits for experts, and must not wait until prefetching
has nothing left to do. So it asks for a turn before each chunk of at most 4 MiB: a turn comes when
no demand is under way, and while a reader wants turns, prefetches start no reads. A demand that
arrives during a chunk shares the disk with it, as with a chunk of a prefetch. A turn comes after a
second at the latest, also where demands never end or the scheduler has failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from greenroom.core.scheduler.view import StateView

POLL_S = 0.0005  # far below the time of a layer that waits for experts
MOST_S = 1.0


class DiskTurns:
    """Turns at the disk after demands for experts, and before their prefetches.

    `view` is that of the experts' scheduler. One thread uses an instance.
    """

    def __init__(self, view: StateView) -> None:
        self._view = view

    @contextmanager
    def before_prefetches(self) -> Iterator[None]:
        """Context manager within which prefetches of experts start no reads from disk."""
        self._view.hold_prefetches(True)
        try:
            yield
        finally:
            self._view.hold_prefetches(False)

    def wait(self) -> None:
        """Wait for a turn: until no layer waits for an expert."""
        until = time.monotonic() + MOST_S
        while self._view.demands and time.monotonic() < until:
            time.sleep(POLL_S)
