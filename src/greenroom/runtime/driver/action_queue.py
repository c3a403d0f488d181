"""Queue of the scheduler's actions for the thread that runs a model's forward pass."""

from __future__ import annotations

from collections import deque

from greenroom.core.events import ComputeGroup, Finish
from greenroom.errors import ClosedError, Interrupted
from greenroom.runtime.driver.change_signal import ChangeSignal


class ActionQueue(deque[ComputeGroup | Finish]):
    """Queue of expert groups that a model's forward pass computes, with the driver's errors.

    A step is the computation of one MoE layer; its last action is a `Finish`. Callers of `put`,
    `wait` and `mark_broken` hold `lock`, which is that of `changed`; `interrupt`, `resume` and
    `close` take it; the checks need no lock. `with lock` runs no Python.

    stopped: one of the checks raises; else they need not be called
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = ChangeSignal()
        self.lock = self.changed.lock
        self.closed = self.interrupted = self.stopped = False
        self.broken: BaseException | None = None
        self.host_error: BaseException | None = None  # raised by a job of the host processor

    def put(self, action: ComputeGroup | Finish) -> None:
        self.append(action)
        self.changed.notify_all()

    def wait(self) -> None:
        """Wait until another thread changes the driver's state.

        Raises the error of a failed computation on the host processor, or ClosedError if the driver
        is closed or broken. The caller holds the lock `changed`.
        """
        self.check_open()
        if (error := self.host_error) is not None:
            self.host_error = None
            raise error
        self.changed.wait()

    def wait_for_action(self) -> None:
        """Wait for the next action; raises Interrupted, and the errors of `wait`."""
        while not self:
            self.check_interrupted()
            self.wait()

    def check_open(self) -> None:
        """Raise ClosedError if the model was detached or its expert cache is unusable."""
        if self.closed:
            raise ClosedError("Greenroom was detached from this model: load the model again")
        if self.broken is not None:
            raise ClosedError(
                f"the cache of experts is unusable after {self.broken!r}: load the model again"
            ) from self.broken

    def check_interrupted(self) -> None:
        """Raise Interrupted if the model's current forward pass was interrupted."""
        if self.interrupted:
            raise Interrupted(
                "the forward pass was interrupted, because nobody waits for its result"
            )

    def interrupt(self) -> None:
        """Let `check_interrupted` raise Interrupted, until `resume`."""
        with self.lock:
            self.interrupted = self.stopped = True
            self.changed.notify_all()

    def resume(self) -> None:
        """End what `interrupt` has begun."""
        with self.lock:
            self.interrupted = False
            self.stopped = self.closed or self.broken is not None

    def close(self) -> None:
        """Let every later step raise ClosedError."""
        with self.lock:
            self.closed = self.stopped = True

    def mark_broken(self, error: BaseException) -> None:
        """Mark the expert driver as broken, because the contents of its slots are unknown.

        Every later step raises ClosedError. The first error is the one that is reported.
        """
        self.broken, self.stopped = self.broken or error, True
        self.changed.notify_all()
