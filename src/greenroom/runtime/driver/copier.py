"""The copier, whose threads move chunks of experts towards their slots.

With one link (disk to slots) a lane reads a chunk into its own staging buffer and copies it into
the slot. With two (disk to host to device) the lanes of the first link read into the staging slot,
or the slot of host memory, that the scheduler names; those of the second copy from there. Reads and
copies release the interpreter's lock. Every failure is reported like an arrival, so a lane never
dies and no step waits in vain.
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
    """Protocol of a read-only source of experts' bytes, read in chunks."""

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]: ...

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray: ...

    def close(self) -> None: ...


Failure = StoreError | DeviceError
OnDelivery = Callable[[StartChunk, int, Failure | None], None]


class Copier:
    """Threads that move chunks of experts, and call `on_delivery` after each chunk.

    The call is `on_delivery(action, nbytes, error)`.

    Link h has `lanes[h]` threads; between two links lies `host_memory`.
    """

    def __init__(
        self,
        store: Store,
        slots: Tier,
        lanes: Sequence[int],
        on_delivery: OnDelivery,
        host_memory: HostMemory | None = None,
    ) -> None:
        self._store, self._slots, self._on_delivery = store, slots, on_delivery
        self._host_memory = host_memory
        self._queues: dict[tuple[int, int], SimpleQueue[StartChunk | None]] = {
            (link, lane): SimpleQueue() for link, count in enumerate(lanes) for lane in range(count)
        }
        self._threads = [
            threading.Thread(
                target=self._run_lane,
                args=(queue, Staging()),
                name=f"greenroom-{link}-{lane}",
                daemon=True,
            )
            for (link, lane), queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def start(self, action: StartChunk) -> None:
        self._queues[action.link, action.lane].put(action)

    def _run_lane(self, queue: SimpleQueue[StartChunk | None], staging: Staging) -> None:
        while (action := queue.get()) is not None:
            nbytes = 0
            failure: Failure | None = None
            try:
                nbytes = self._move_chunk(action, staging)
            except (StoreError, DeviceError) as error:
                failure = error
            except BaseException as error:
                failure = StoreError(f"expert {action.piece} could not be read: {error!r}")
                failure.__cause__ = error
            self._on_delivery(action, nbytes, failure)

    def _move_chunk(self, action: StartChunk, staging: Staging) -> int:
        """Move a chunk of an expert over its link; return its number of bytes."""
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
        """End the copier's threads, after the chunks in their queues."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
