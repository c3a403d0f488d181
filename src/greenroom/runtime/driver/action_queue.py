"""Queue of scheduler actions that a step's thread waits for, under the driver's lock."""

from __future__ import annotations

import threading
from collections import deque

from greenroom.core.events import ComputeGroup, Finish
from greenroom.errors import ClosedError, Interrupted


class ActionQueue(deque[ComputeGroup | Finish]):
    """Queue of expert groups to compute, with the driver's error states.

    The action that ends the step closes the groups.

    All methods but the checks need the lock, `changed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.closed = self.interrupted = False
        self.broken: BaseException | None = None
        self.host_error: BaseException | None = None  # raised by a job of the host processor

    def put(self, action: ComputeGroup | Finish) -> None:
        self.append(action)
        self.changed.notify_all()

    def wait(self) -> None:
        """Wait until the driver's state changes, or raise the error that prevents it."""
        self.check_open()
        if (error := self.host_error) is not None:
            self.host_error = None
            raise error
        self.changed.wait()

    def check_open(self) -> None:
        """Raise ClosedError if the experts' driver is closed or broken."""
        if self.closed:
            raise ClosedError("the model was detached: load it again")
        if self.broken is not None:
            raise ClosedError(
                f"the cache of experts broke ({self.broken!r}): load the model again"
            ) from self.broken

    def check_interrupted(self) -> None:
        """Raise Interrupted if the model's current forward pass was interrupted."""
        if self.interrupted:
            raise Interrupted("the pass was interrupted: its caller no longer waits for it")

    def interrupt(self) -> None:
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()

    def mark_broken(self, error: BaseException) -> None:
        """Mark the driver as broken: the contents of its slots are unknown."""
        self.broken = self.broken or error
        self.changed.notify_all()
