"""A step that was computed, and that the scheduler has yet to serve."""

from __future__ import annotations

import threading
from collections.abc import Callable

Serve = Callable[[], None]


class DeferredStep(threading.local):
    """The calling thread's step that was computed, and that the scheduler has yet to serve.

    A thread has at most one such step. It is served before the thread asks anything else of the
    scheduler, which therefore decides as if it had served the step at once. The device computes the
    next layer meanwhile.
    """

    def __init__(self) -> None:
        self._serve: Serve | None = None

    def set(self, serve: Serve) -> None:
        """Set the function that serves the step, after an earlier step was served."""
        self.settle()
        self._serve = serve

    def settle(self) -> None:
        """Serve the step, if there is one."""
        if (serve := self._serve) is not None:
            self._serve = None
            serve()
