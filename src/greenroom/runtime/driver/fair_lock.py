"""A lock that threads get in the order in which they request it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that threads get in the order of their requests, for use in `with`.

    A `threading.Lock` goes to any waiting thread: a model that generates takes the lock for every
    layer, so a thread that resizes the cache could wait for seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        if not self._waiting and self._lock.acquire(blocking=False):
            return
        turn = threading.Lock()
        turn.acquire()
        self._waiting.append(turn)
        try:
            self._hand_over()  # its holder may have left before `turn` was there to see
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: the lock must not be handed to this thread
            try:
                self._waiting.remove(turn)
            except ValueError:  # it was
                self._release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    @property
    def locked(self) -> bool:
        """Tell whether a thread has the lock."""
        return self._lock.locked()

    def _release(self) -> None:
        self._lock.release()
        if self._waiting:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the lock to the first thread that waits, if nobody has it."""
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                turn = self._waiting.popleft()
            except IndexError:  # an interrupt has ended the wait
                self._lock.release()
                continue
            turn.release()  # whose thread has the lock now
            return
