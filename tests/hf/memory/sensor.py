"""A sensor of free memory whose readings a test makes."""

from __future__ import annotations

import queue
import threading

from greenroom.core.cache.pressure import MemoryReading

PATIENCE = 60.0
PLENTY, SHORT = 100 << 30, 0  # free bytes


class FakeSensor:
    """A sensor whose readings the test makes; each `wait` ends with the next one."""

    def __init__(self) -> None:
        self.readings: queue.Queue[MemoryReading | None] = queue.Queue()
        self.next = MemoryReading(0.0, PLENTY, 0)
        self.now, self.handled, self.closed = 0.0, threading.Semaphore(0), False
        self._first, self.unreadable = True, False
        self.error: Exception | None = None  # that `read` raises
        self.wait_error: Exception | None = None

    def wait(self, seconds: float) -> None:
        if not self._first:
            self.handled.release()
        self._first = False
        if (reading := self.readings.get()) is not None:
            self.next = reading
        if self.wait_error is not None:
            raise self.wait_error

    def read(self) -> MemoryReading | None:
        if self.error is not None:
            raise self.error
        return None if self.unreadable else self.next

    def stop_waiting(self) -> None:
        self.readings.put(None)

    def close(self) -> None:
        self.closed = True

    def report(self, free: int, after_s: float = 1.0) -> None:
        """Make a reading, and wait until the watcher has reacted."""
        self.now += after_s
        self.readings.put(MemoryReading(self.now, free, 0))
        assert self.handled.acquire(timeout=PATIENCE), "the watcher does not react"
