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
        self._locked = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._locked:
                self._locked = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: the lock must not be handed to this thread
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._locked = False
