"""The orders of a step: what the thread that computes waits for, under the driver's one lock."""

from __future__ import annotations

import threading
from collections import deque

from greenroom.core.events import ComputeGroup, Finish
from greenroom.errors import ClosedError, Interrupted


class ActionQueue(deque[ComputeGroup | Finish]):
    """ActionQueue one after another, and why no more will come, where that is so.

    All but the checks is done with `changed` held, the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.closed = self.interrupted = False
        self.broken: BaseException | None = None
        self.host_error: BaseException | None = None  # of the host's processor

    def put(self, order: ComputeGroup | Finish) -> None:
        self.append(order)
        self.changed.notify_all()

    def wait(self) -> None:
        """Until something has changed."""
        self.check_open()
        if (error := self.host_error) is not None:
            self.host_error = None
            raise error
        self.changed.wait()

    def check_open(self) -> None:
        """ClosedError where nothing can be had any more."""
        if self.closed:
            raise ClosedError("the model was detached: load it again")
        if self.broken is not None:
            raise ClosedError(
                f"the cache of experts broke ({self.broken!r}): load the model again"
            ) from self.broken

    def check_wanted(self) -> None:
        """Interrupted where nobody waits for the pass."""
        if self.interrupted:
            raise Interrupted("the pass was given up: nobody waits for it")

    def interrupt(self) -> None:
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """Nobody knows any more what is where."""
        self.broken = self.broken or error
        self.changed.notify_all()
