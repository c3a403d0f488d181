"""A lock, and a signal that the state which it protects has changed."""

from __future__ import annotations

import threading


class ChangeSignal:
    """A lock with a signal to the threads that wait for a change.

    It does what a `threading.Condition` does, but runs less Python: while experts are read, a
    thread waits and is woken several times in a layer. A wait may end without a change, so callers
    wait in a loop.

    lock: the lock, for use in `with`, which runs no Python: Ctrl-C never leaves it taken
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting: list[threading.Lock] = []  # one of each wait, held until a change

    def wait(self) -> None:
        """Wait for a change; the caller holds the lock once, and again after the wait."""
        change = threading.Lock()
        change.acquire()
        self._waiting.append(change)
        try:
            self.lock.release()  # here: behind it, an interrupt finds the lock taken again
            change.acquire()
        finally:
            try:
                self.lock.acquire()
            except BaseException:  # Ctrl-C, perhaps before the lock was taken
                if not self.lock._is_owned():  # type: ignore[attr-defined]
                    self.lock.acquire()
                raise

    def notify_all(self) -> None:
        """Wake all threads that wait; the caller holds the lock."""
        while self._waiting:
            self._waiting.pop().release()
