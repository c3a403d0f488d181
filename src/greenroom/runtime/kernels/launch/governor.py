"""Let fewer threads enter parallel regions while other programs use the cores.

The threads of a region wait for one another. If one of them loses its core to another program, all
wait until the scheduler gives it back, for some milliseconds at a time. One thread fewer leaves a
core to the other program, and no thread waits. The results have the same bits with any number of
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import inf

READING = 0.01  # seconds between two readings of how long threads have waited for a core
STALE = 0.1  # after so many seconds without a reading the next one is compared with none
WINDOW = 0.1  # seconds that a decision looks back
SHARE = 0.4  # of the window that all threads together may wait for a core (docs/log/2026-11.md)
SHORTEST, LONGEST = 0.1, 2.0  # seconds with fewer threads, until the full number is tried again
STABLE = 0.4  # seconds with the full number of threads, after which the next loss is a new one


class Governor(threading.local):
    """The number of threads that enter the next parallel region, for each calling thread.

    A caller asks for `threads` before a region. If a reading is `due`, it reads how long the
    region's threads have waited for a core, and passes that to `record`.
    """

    def __init__(self) -> None:
        self._limit: float = inf  # of threads
        self._changed = -inf  # when the limit was last set
        self._hold = SHORTEST
        self._read = -inf  # when the last reading ended
        self._last: Mapping[int, int] = {}  # the last reading
        self._start_window()

    def _start_window(self) -> None:
        self._waited, self._elapsed = 0, 0.0  # nanoseconds, seconds

    def _set_limit(self, limit: float, now: float) -> None:
        self._limit, self._changed, self._read = limit, now, -inf
        self._start_window()

    def threads(self, full: int, now: float) -> int:
        """Return how many threads enter the next region, out of the full number."""
        if self._limit < full:
            if now - self._changed < self._hold:
                return int(self._limit)
            self._set_limit(inf, now)
        return full

    def due(self, now: float) -> bool:
        """Check that the next region should be measured."""
        return now - self._read >= READING

    def record(self, waited: Mapping[int, int], now: float) -> None:
        """Take a reading, and lower the number of threads if they have waited too long.

        waited: nanoseconds that each of a region's threads has waited for a core since it began, by
                the thread's number
        """
        last = self._last if now - self._read < STALE else {}
        self._waited += sum(ns - last[thread] for thread, ns in waited.items() if thread in last)
        self._elapsed += now - self._read if last else 0
        self._last, self._read = waited, now
        if self._waited > SHARE * WINDOW * 1e9:
            lost = round(self._waited * 1e-9 / max(self._elapsed, WINDOW))  # cores
            again = now - self._changed < STABLE
            self._hold = min(2 * self._hold, LONGEST) if again else SHORTEST
            self._set_limit(max(1, len(waited) - max(1, lost)), now)
        elif self._elapsed >= WINDOW:
            self._start_window()
