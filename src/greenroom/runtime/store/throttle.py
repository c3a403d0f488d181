"""A line: what a link of a set bandwidth would take, for stores that stand in for one."""

from __future__ import annotations

import threading
import time

OVERSLEPT = 0.001  # seconds; a thread that wakes later than this was kept from running


class Throttle:
    """Carries one chunk after another at `bandwidth` bytes a second, for any number of threads.

    The line keeps its own clock: a chunk is due when those before it and it itself have been
    carried, and its thread sleeps until then. Sleep lasts longer than it was asked to; what a
    thread overslept is taken off the time at which it asks next, so that the line never drifts and
    one thread alone reaches the bandwidth too. `bandwidth` may be set while nothing is carried.
    """

    def __init__(self, bandwidth: float = float("inf")) -> None:
        self.bandwidth = bandwidth
        self._lock, self._local = threading.Lock(), threading.local()
        self._free = 0.0  # when the last chunk so far has been carried

    def carry(self, nbytes: int, early: float = 0.0) -> None:
        """Return when the bytes have been carried, or `early` seconds before.

        What the caller does in these seconds (copying the bytes) is then part of the chunk's time
        on the line, as it is with a link that writes as it carries.
        """
        if self.bandwidth == float("inf"):
            return
        with self._lock:
            asked = time.perf_counter() - getattr(self._local, "overslept", 0.0)
            self._free = max(asked, self._free) + nbytes / self.bandwidth
            due = self._free - early
        self._local.overslept = self._sleep_until(due)

    def _sleep_until(self, due: float) -> float:
        """Seconds too many that were slept; 0 where there was no need to sleep."""
        left, slept = due - time.perf_counter(), False
        while left > 0:
            time.sleep(left)
            left, slept = due - time.perf_counter(), True
        return min(-left, OVERSLEPT) if slept else 0.0
