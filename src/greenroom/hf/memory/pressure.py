"""Shrink the expert cache while other processes need memory: a thread that watches and resizes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.amounts import show_bytes
from greenroom.core.cache.pressure import (
    LONGEST_S,
    CacheSize,
    MemoryReading,
    PressureRule,
    reserve_for,
)
from greenroom.errors import ClosedError, GreenroomError
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.memory.pressure import PressureSensor
from greenroom.runtime.memory.system import trim_heap

CHANGES = 1000  # the latest that are stored
JOIN_S = 10.0  # for the thread's end; a resize waits for the expert reads of a step

log = logging.getLogger(__name__)


class LimitedSlots(Protocol):
    """Slots of an expert cache whose number may be limited while memory is short.

    `min_slots` is the least limit.
    """

    min_slots: int

    @property
    def limited(self) -> bool:
        """Return whether the number is limited now."""

    def full_slots(self) -> int:
        """Return the number of slots without a limit."""

    def limit_slots(self, slots: int) -> None:
        """Resize the expert cache to at most `slots` slots."""


class FixedSlots:
    """Slots of an expert cache of fixed size, which may be limited for a time."""

    min_slots = 1

    def __init__(self, driver: Driver, slots: int) -> None:
        self._driver, self._slots = driver, slots

    @property
    def limited(self) -> bool:
        return self._driver.scheduler.capacity < self._slots

    def full_slots(self) -> int:
        return self._slots

    def limit_slots(self, slots: int) -> None:
        target, now = min(slots, self._slots), self._driver.scheduler.capacity
        self._driver.resize(target)
        if target < now:
            trim_heap()


@dataclass(frozen=True, slots=True)
class CacheChange:
    """A change of the cache's size by the watcher.

    at:            end of the change, in seconds of time.monotonic
    before, slots: number of slots before and after it
    free:          bytes that were free when it was decided
    stalled:       whether processes had waited for memory then
    """

    at: float
    before: int
    slots: int
    free: int
    stalled: bool


class PressureWatcher:
    """Thread that shrinks an expert cache while memory is short, and grows it again afterwards.

    `changes` has the latest changes of the cache's size.
    """

    def __init__(
        self,
        driver: Driver,
        slot_bytes: int,
        budget: int | None,
        slots: Callable[[], LimitedSlots | None],
        lock: threading.Lock,
        min_slots: int = 1,
        sensor: PressureSensor | None = None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread, which ends when `slots` returns None, or with `stop`.

        budget:    memory budget of the process in bytes, if it has one
        lock:      held while the cache is resized
        min_slots: least number of slots, if that of the slots is not more
        on_growth: called in the thread after the cache has grown, without the lock
        """
        self._driver, self._slots, self._lock = driver, slots, lock
        self._sensor = PressureSensor() if sensor is None else sensor
        self._ends, self._on_growth, self._pid = False, on_growth, os.getpid()
        self._end_lock = threading.RLock()  # a finaliser may call `stop` in any thread
        self.changes: deque[CacheChange] = deque(maxlen=CHANGES)
        self._shrinks = self._growths = self._released = 0
        self._shortage, self._warned = "", False
        self._slot_bytes, self._min_slots = slot_bytes, min_slots
        try:
            self._rule = PressureRule(self._reserve(budget), slot_bytes)
            self._thread = threading.Thread(
                target=self._run, name="greenroom-pressure", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._sensor.close()
            raise

    def _reserve(self, budget: int | None) -> int:
        """Return the bytes to leave free to others, by a first reading."""
        reading = self._sensor.read()
        assert reading is not None  # the first one
        to_take = self._driver.scheduler.view.free_slots * self._slot_bytes
        if budget is not None:
            to_take = max(0, budget - reading.resident)
        return reserve_for(reading.free, to_take)

    def stop(self) -> None:
        """End the thread, after a resize that is under way. A second call does nothing.

        In a forked child, which has no such thread, it does nothing either.
        """
        if os.getpid() != self._pid:
            return
        with self._end_lock:
            if self._ends:
                return
            self._ends = True
            self._sensor.stop_waiting()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def stats(self) -> dict[str, Any]:
        """Return how often the cache has changed its size, and why it has shrunk.

        reserve_bytes:  free memory below which the cache shrinks
        shrinks:        number of times that it gave slots back
        growths:        number of times that it got slots back
        released_bytes: sum of the memory that it gave back
        cause:          cause of the last shrink; "" before the first one
        """
        return {
            "reserve_bytes": self._rule.reserve,
            "shrinks": self._shrinks,
            "growths": self._growths,
            "released_bytes": self._released,
            "cause": self._shortage,
        }

    def _run(self) -> None:
        wait_s, failed = 0.0, False
        try:
            while not self._ends:
                self._sensor.wait(wait_s)
                try:
                    if (wait_s := self._react()) < 0:
                        return
                except ClosedError:
                    return  # the cache was closed
                except Exception:
                    if not failed:
                        log.exception("free memory is not watched for a moment")
                    wait_s, failed = LONGEST_S, True
        except Exception:
            log.exception("free memory is not watched any more")
            self._lift_limit()
        finally:
            with self._end_lock:
                self._ends = True
                self._sensor.close()

    def _lift_limit(self) -> None:
        """Give the cache its full size, since nobody would do it later."""
        with self._lock, contextlib.suppress(GreenroomError):
            if not self._ends and (slots := self._slots()) is not None:
                slots.limit_slots(slots.full_slots())

    def _react(self) -> float:
        """Resize the cache if necessary; return the seconds until the next reading.

        They are negative when there is nothing to watch any more.
        """
        growths = self._growths
        with self._lock:
            if self._ends or (slots := self._slots()) is None:
                return -1.0
            wait_s = self._decide(slots)
        if self._growths > growths:
            self._on_growth()
        return wait_s

    def _decide(self, slots: LimitedSlots) -> float:
        """Resize the cache as the rule decides; return the seconds until the next reading."""
        scheduler, reading = self._driver.scheduler, self._sensor.read()
        if reading is None:
            return LONGEST_S
        before = scheduler.capacity
        parts = self._driver.pieces.split or self._driver.pieces.copies
        unfilled = 0 if parts is not None else scheduler.view.free_slots
        # Without a limit the cache has the size that keys and values left it: it stays.
        full = slots.full_slots() if slots.limited else before
        least = max(self._min_slots, slots.min_slots)
        size = CacheSize(least, full, before, before - unfilled)
        target = self._rule.decide(reading, size)
        if target != before:
            self._resize(slots, target, reading)
        return self._rule.next_reading_s(size)

    def _resize(self, slots: LimitedSlots, target: int, reading: MemoryReading) -> None:
        driver = self._driver
        before = driver.scheduler.capacity
        try:
            slots.limit_slots(target)
        except ClosedError:
            raise
        except GreenroomError as error:  # a layer's pinned experts, or no address space
            level = logging.DEBUG if self._warned else logging.WARNING  # it is tried again
            log.log(level, "the expert cache keeps its %d slots: %s", before, error)
            self._warned = True
            return
        now, self._warned = driver.scheduler.capacity, False
        at, free = time.monotonic(), reading.free
        self.changes.append(CacheChange(at, before, now, free, reading.stalled))
        if now < before:
            self._shrinks += 1
            self._released += (before - now) * self._slot_bytes
            self._shortage = f"only {show_bytes(reading.free)} of memory was free"
            if reading.stalled:
                self._shortage += ", and processes waited for memory"
            elif reading.at_limit:
                self._shortage += ", and a cgroup was at its limit"
            cause = self._shortage
            log.info("the expert cache shrinks from %d to %d slots: %s", before, now, cause)
        elif now > before:
            self._growths += 1
            log.info("the expert cache grows from %d to %d slots", before, now)
