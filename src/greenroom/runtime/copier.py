"""The copier: one thread a lane, each reading chunks into its staging buffer and on into slots.

Reading and copying happen outside the interpreter's lock. Whatever goes wrong with a chunk is
reported like its arrival, so that a lane never dies and nobody waits for it in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from greenroom.core.events import StartChunk
from greenroom.core.layout import Copy
from greenroom.errors import StoreError
from greenroom.runtime.store import Chunk, Staging


class Store(Protocol):
    """A read-only mapping from piece to bytes."""

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]: ...

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray: ...

    def close(self) -> None: ...


class Slots(Protocol):
    """What the copier needs of a tier."""

    def write(self, slot: int, copies: tuple[Copy, ...], data: np.ndarray, start: int) -> None: ...


Deliver = Callable[[StartChunk, int, StoreError | None], None]


class Copier:
    """Carries out StartChunk actions; calls `deliver(action, nbytes, error)` from its threads."""

    def __init__(self, store: Store, slots: Slots, lanes: int, deliver: Deliver) -> None:
        self._store, self._slots, self._deliver = store, slots, deliver
        self._jobs: list[SimpleQueue[StartChunk | None]] = [SimpleQueue() for _ in range(lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"greenroom-{i}", daemon=True)
            for i, jobs in enumerate(self._jobs)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, action: StartChunk) -> None:
        self._jobs[action.lane].put(action)

    def _work(self, jobs: SimpleQueue[StartChunk | None]) -> None:
        staging = Staging()
        while (action := jobs.get()) is not None:
            nbytes, failure = 0, None
            try:
                chunk = self._store.chunks(action.piece)[action.chunk]
                data = self._store.read(chunk, staging)
                self._slots.write(action.slot, chunk.extent.copies, data, chunk.start)
                nbytes = chunk.length
            except StoreError as error:
                failure = error
            except Exception as error:
                failure = StoreError(f"expert {action.piece} could not be read: {error!r}")
                failure.__cause__ = error
            self._deliver(action, nbytes, failure)

    def close(self) -> None:
        """End the threads, after what they are reading now."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
