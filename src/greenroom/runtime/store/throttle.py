"""Throttle: delays transfers as a link of a given bandwidth would."""

from __future__ import annotations

import threading
import time

MOST_OVERSLEPT = 0.001  # seconds; a later wake-up means that the thread was not scheduled


class Throttle:
    """A simulated link that carries one chunk after another at `bandwidth` bytes a second.

    The throttle is thread-safe. A thread sleeps until its chunk, and all chunks before it, would
    have been carried. A sleep lasts longer than planned. The thread's next chunk counts as begun
    earlier by the excess, up to a millisecond, so a single thread reaches the bandwidth too.
    `bandwidth` may be set while no chunk is carried.
    """

    def __init__(self, bandwidth: float = float("inf")) -> None:
        self.bandwidth = bandwidth
        self._lock, self._local = threading.Lock(), threading.local()
        self._free = 0.0  # time at which the last chunk has been carried

    def carry(self, nbytes: int, early: float = 0.0) -> None:
        """Sleep until the simulated link would have carried `nbytes` bytes.

        The sleep ends `early` seconds before that time: the caller copies the bytes in the
        meantime. So the copy counts as part of the transfer, as on a link that writes bytes while
        it carries others.
        """
        if self.bandwidth == float("inf"):
            return
        with self._lock:
            request_time = time.perf_counter() - getattr(self._local, "overslept", 0.0)
            self._free = max(request_time, self._free) + nbytes / self.bandwidth
            due = self._free - early
        self._local.overslept = self._sleep_until(due)

    def _sleep_until(self, due: float) -> float:
        """Sleep until a time; return the seconds slept too long, or 0 if there was no sleep."""
        left, slept = due - time.perf_counter(), False
        while left > 0:
            time.sleep(left)
            left, slept = due - time.perf_counter(), True
        return min(-left, MOST_OVERSLEPT) if slept else 0.0
