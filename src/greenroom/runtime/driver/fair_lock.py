"""A lock that threads get in the order in which they request it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that threads get in the order of their requests, for use in `with`.

    A `threading.Lock` goes to any waiting thread: a model that generates takes the lock for every
    layer, so a thread that resizes the cache could wait for seconds.

    An interrupt may come between `__enter__` and the body of `with`, or before `__exit__` has done
    anything: then the thread has the lock for good. It gets it again at its next request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[threading.Lock, int]] = deque()  # with the thread of each
        self._owner = 0  # the thread that has the lock; 0: none

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._lock:
            if self._owner in (0, thread):
                self._owner = thread
                return
            turn = threading.Lock()
            turn.acquire()
            # A request that was interrupted before its wait is one of nobody.
            for left in [each for each in self._waiting if each[1] == thread]:
                self._waiting.remove(left)
            request = turn, thread
            self._waiting.append(request)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: the lock must not be handed to this thread
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
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
            self._owner = 0
            if self._waiting:
                turn, self._owner = self._waiting[0]
                del self._waiting[0]  # an interrupt comes behind calls only
                turn.release()
