"""The copier, whose threads move experts in chunks from the disk to their cache slots.

A link leads from one memory to the next; each thread is one lane of a link. A chunk is a part of an
expert of at most 4 MiB. With one link (disk to slots) a lane reads a chunk into its own
staging buffer and copies the chunk into the slot. With two links (disk to host memory to device)
the lanes of the first link read into the staging slot, or the cache slot in host memory, that the
scheduler names; the lanes of the second link copy from there. Reads and copies release Python's
GIL. A failed chunk is reported as an arrived one is, so no thread ends early and no step waits
forever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from greenroom.core.events import Event, Failed, Landed, StartChunk
from greenroom.errors import DeviceError, StoreError
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.driver.action_queue import ActionQueue
from greenroom.runtime.slots.tier import Tier
from greenroom.runtime.store.disk import Chunk, Staging

if TYPE_CHECKING:
    from greenroom.runtime.driver.driver import Driver


class Store(Protocol):
    """Protocol of a read-only source of expert weights, such as a checkpoint on disk.

    An expert is read in one or more chunks, each into a staging buffer of the calling thread.
    """

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]: ...

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray: ...

    def close(self) -> None: ...


Failure = StoreError | DeviceError
OnDelivery = Callable[[StartChunk, int, Failure | None], None]


class Copier:
    """Threads that move experts in chunks from a store to cache slots.

    After each chunk its thread calls `on_delivery(action, nbytes, error)`; `error` is None if the
    chunk arrived. Link number h (0: from the disk) has `lanes[h]` threads. With two links, chunks
    pass through `host_memory`.
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
        self._threads: list[threading.Thread] = []
        try:
            for (link, lane), queue in self._queues.items():
                thread = threading.Thread(
                    target=self._run_lane,
                    args=(queue, Staging()),
                    name=f"greenroom-{link}-{lane}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system refuses a thread
            self.close()
            raise

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
                failure = read_error(action.piece, f": {error!r}")
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
        """End the copier's threads, after they have moved the chunks that are queued."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def read_error(piece: int, reason: str = "") -> StoreError:
    """Make the error for an expert that could not be read."""
    return StoreError(f"expert {piece} of the model could not be read{reason}")


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
                with contextlib.suppress(BaseException):  # every waiting thread gets the error
                    self.handle(action, nbytes, error)

    def handle(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
        """Deliver a chunk; the driver's lock is held.

        An exception, such as an interrupt, leaves a chunk that was delivered in part: the driver
        is broken.
        """
        try:
            self._deliver(action, nbytes, error)
        except BaseException as exception:  # it must reach the threads that wait
            self._actions.mark_broken(exception)
            raise

    def _deliver(self, action: StartChunk, nbytes: int, error: Failure | None) -> None:
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
