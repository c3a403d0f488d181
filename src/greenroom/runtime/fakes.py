"""Fakes that ship: a device that poisons what is stale, and a store that is slow or fails.

`device="fake"` uses both, to show that nothing depends on when and in which order bytes arrive.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np

from greenroom.errors import StoreError
from greenroom.runtime.driver.copier import Store
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Chunk, Staging
from greenroom.runtime.store.throttle import Throttle

POISON = 0xFF  # every floating-point type reads NaN


class FakeSlots(HostSlots):
    """Host slots that hold NaN until the bytes of a piece have arrived."""

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.bytes(slot)[:] = POISON

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.clear(source)


class FakeStore:
    """Another store, seen through a slow and unreliable line.

    A read takes `latency` seconds, up to `jitter` more by chance, and its turn on a line of
    `bandwidth` bytes a second.
    `fails(n)` is asked before the n-th read, counted from 1; True raises StoreError.
    """

    def __init__(
        self,
        store: Store,
        *,
        bandwidth: float = float("inf"),
        latency: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        fails: Callable[[int], bool] = lambda read: False,
    ) -> None:
        self._store, self._fails = store, fails
        self._latency, self._jitter = latency, jitter
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.throttle = Throttle(bandwidth)
        self.reads = 0

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]:
        return self._store.chunks(expert_id)

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        with self._lock:
            self.reads += 1
            number, wait = self.reads, self._latency + self._jitter * self._random.random()
        time.sleep(wait)
        if self._fails(number):
            raise StoreError(f"read {number} failed: Input/output error (fake)")
        self.throttle.carry(chunk.length)
        return self._store.read(chunk, staging)

    def close(self) -> None:
        self._store.close()
