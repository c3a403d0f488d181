"""A slow, failing store, and slots filled with NaN until an expert arrives.

With `--read-limit`, experts are read through this store, which imitates a slower disk. Its errors
are for tests. The device `fake` has such a store and such slots, to show that results do not depend
on when and in which order experts arrive.
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

POISON = 0xFF  # NaN in every floating-point type


class FakeSlots(HostSlots):
    """Fake slots in host memory, which are filled with NaN until an expert's bytes arrive."""

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.bytes(slot)[:] = POISON

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.clear(source)


class FakeStore:
    """Fake store that reads experts from another store over a slow, unreliable link.

    latency, jitter: each read waits `latency` seconds, and a random part of `jitter` seconds
    bandwidth: bytes a second that all reads share
    fails: called with the number of each read, from 1; if it returns True, the read raises
        StoreError
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
            raise StoreError(
                f"read number {number} failed: Input/output error (of the fake device)"
            )
        self.throttle.carry(chunk.length)
        return self._store.read(chunk, staging)

    def close(self) -> None:
        self._store.close()
