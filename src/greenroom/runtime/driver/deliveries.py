"""Deliveries of chunks: what a driver does when a chunk has moved, or failed to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from greenroom.core.events import Event, Failed, Landed, StartChunk
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.driver.copier import Failure

if TYPE_CHECKING:
    from greenroom.runtime.driver.driver import Driver


class Deliveries:
    """Records the times of a driver's chunks, and tells the scheduler when they have landed."""

    def __init__(
        self, driver: Driver, actions: ActionQueue, handle: Callable[[Event], None]
    ) -> None:
        """Deliver to a driver; `handle` sends the scheduler an event, with the driver's lock."""
        self._driver, self._actions, self._handle = driver, actions, handle
        self._starts: dict[tuple[int, int], float] = {}  # time by (link, lane)

    def begin(self, action: StartChunk, now: float) -> None:
        """Record that a chunk begins to move; the driver's lock is held."""
        self._driver.meter.links[action.link].chunk_started(now)
        self._starts[action.link, action.lane] = now

    def arrive(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        """Deliver a chunk that arrived or failed, in a copier's thread."""
        with self._driver.lock:
            if self._actions.broken is None:
                try:
                    self.handle(action, nbytes, error)
                except BaseException as exception:  # it must reach the threads that wait
                    self._actions.mark_broken(exception)

    def handle(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        """Deliver a chunk; the driver's lock is held."""
        driver, now = self._driver, time.perf_counter()
        driver.meter.links[action.link].chunk_ended(now, nbytes)
        if (timeline := driver.timeline) is not None:
            begin = self._starts[action.link, action.lane]
            timeline.add_chunk(driver.links[action.link], action, begin, now)
        if error is None:
            driver.changes.land(action, len(driver.links) - 1)
            self._handle(Landed(action.lane, action.piece, action.link))
        else:
            step = driver.scheduler.step
            if step is not None and action.piece in step.missing:
                driver.error = driver.error or error
            self._handle(Failed(action.lane, action.piece, action.link))
