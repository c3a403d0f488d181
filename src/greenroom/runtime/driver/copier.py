"""The copier: one thread for each lane of each link, carrying chunks towards their slots.

With one link (disk to slots) a lane reads a chunk into a staging buffer of its own and copies it
into the slot. With two (disk to host to device) the first link's lanes read into the staging slot,
or the slot of host memory, that the scheduler names, and the second's copy from there. Reading
and copying happen outside the interpreter's lock. Whatever goes wrong with a chunk is reported like
its arrival, so that a lane never dies and nobody waits for it in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from greenroom.core.events import StartChunk
from greenroom.errors import DeviceError, StoreError
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.slots.tier import Tier
from greenroom.runtime.store.disk import Chunk, Staging


class Store(Protocol):
    """A read-only mapping from piece to bytes."""

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]: ...

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray: ...

    def close(self) -> None: ...


Failure = StoreError | DeviceError
Deliver = Callable[[StartChunk, int, Failure | None], None]


class Copier:
    """Carries out StartChunk actions; calls `deliver(action, nbytes, error)` from its threads.

    `lanes[h]` threads for link h; between two links lies `host_memory`.
    """

    def __init__(
        self,
        store: Store,
        slots: Tier,
        lanes: Sequence[int],
        deliver: Deliver,
        host_memory: HostMemory | None = None,
    ) -> None:
        self._store, self._slots, self._deliver = store, slots, deliver
        self._host_memory = host_memory
        self._jobs: dict[tuple[int, int], SimpleQueue[StartChunk | None]] = {
            (link, lane): SimpleQueue() for link, count in enumerate(lanes) for lane in range(count)
        }
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(jobs, Staging()),
                name=f"greenroom-{link}-{lane}",
                daemon=True,
            )
            for (link, lane), jobs in self._jobs.items()
        ]
        for thread in self._threads:
            thread.start()

    def start(self, action: StartChunk) -> None:
        self._jobs[action.link, action.lane].put(action)

    def _work(self, jobs: SimpleQueue[StartChunk | None], staging: Staging) -> None:
        while (action := jobs.get()) is not None:
            nbytes = 0
            failure: Failure | None = None
            try:
                nbytes = self._carry(action, staging)
            except (StoreError, DeviceError) as error:
                failure = error
            except BaseException as error:
                failure = StoreError(f"expert {action.piece} could not be read: {error!r}")
                failure.__cause__ = error
            self._deliver(action, nbytes, failure)

    def _carry(self, action: StartChunk, staging: Staging) -> int:
        """Take a chunk over its link; the bytes that it has."""
        chunk = self._store.chunks(action.piece)[action.chunk]
        if self._host_memory is None:
            data = self._store.read(chunk, staging)
            copies, start = chunk.extent.copies, chunk.start
        elif action.link == 0:
            self._host_memory.read_chunk(action, chunk, self._store.read, staging)
            return chunk.length
        else:
            copies, data, start = self._host_memory.chunk_source(action, chunk)
        pool, number = self._slots.at(action.slot)
        pool.write(number, copies, data, start)
        return chunk.length

    def close(self) -> None:
        """End the threads, after what they are carrying now."""
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
