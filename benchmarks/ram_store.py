"""A store in memory: all experts in one allocation, behind a link of a set bandwidth.

Simulates any link (a faster disk, PCI Express) on a machine with room for the model: the
runtime moves the same chunks by the same rules; only the time of arrival is set.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.layout import Catalog
from greenroom.errors import BudgetError
from greenroom.runtime.memory.system import available_bytes, reserve_memory
from greenroom.runtime.store.disk import CHUNK_BYTES, Chunk, DiskStore, Staging
from greenroom.runtime.store.throttle import Throttle

_TIMED_COPIES = 9
_READERS = 4  # threads that fill it: what a disk needs to reach its speed


class RamStore:
    """Experts of a catalog, read from disk once into memory. Thread-safe.

    A read returns when `throttle` has carried the chunk, less the time in which the reader then
    copies it into a slot (measured at the start), so a chunk is in its slot when it is due. The
    bytes are a view of the store's own memory, which must not be written to; staging buffers are
    not used. Memory is freed with the last reference to the store, not by `close`: several caches,
    attached one after another, can use the same store. Raises BudgetError if the experts do not fit
    into the free memory.
    """

    direct = True  # nothing of what it holds is in the page cache

    def __init__(
        self, catalog: Catalog, throttle: Throttle | None = None, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.throttle = throttle or Throttle()
        disk = DiskStore(catalog, chunk_bytes=chunk_bytes)
        try:
            self._chunks = [disk.chunks(expert) for expert in range(catalog.experts)]
            self._read_all(disk)
        finally:
            disk.close()
        self._copy_s = self._seconds_a_byte(chunk_bytes)

    def _read_all(self, disk: DiskStore) -> None:
        total = sum(chunk.length for chunks in self._chunks for chunk in chunks)
        if total > (available := available_bytes()):
            raise BudgetError(
                f"the experts need {show_bytes(total)} of memory: {show_bytes(available)} are free"
            )
        self._bytes = np.frombuffer(reserve_memory(total, large_pages=True), np.uint8)
        self._at: dict[tuple[int, int], int] = {}  # (file, offset of a chunk) -> its place here
        end = 0
        for chunks in self._chunks:
            for chunk in chunks:
                self._at[self._place(chunk)] = end
                end += chunk.length

        def read(chunks: tuple[Chunk, ...]) -> None:
            staging = Staging()
            for chunk in chunks:
                begin = self._at[self._place(chunk)]
                self._bytes[begin : begin + chunk.length] = disk.read(chunk, staging)

        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(read, self._chunks))  # the list raises what a reader raised

    @staticmethod
    def _place(chunk: Chunk) -> tuple[int, int]:
        return chunk.extent.file, chunk.extent.offset + chunk.start

    def _seconds_a_byte(self, chunk_bytes: int) -> float:
        """Seconds a byte of a copy from memory that no processor cache holds."""
        nbytes = min(chunk_bytes, self._bytes.size)
        target, seconds = np.zeros(nbytes, np.uint8), []
        for begin in np.linspace(0, self._bytes.size - nbytes, _TIMED_COPIES).astype(int).tolist():
            start = time.perf_counter()
            target[:] = self._bytes[begin : begin + nbytes]
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) / nbytes

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]:
        """Return an expert's chunks, with the boundaries that the disk store uses."""
        return self._chunks[expert_id]

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        """Return a chunk's bytes [length] as uint8, a view of the store's memory."""
        at = self._at[self._place(chunk)]
        self.throttle.carry(chunk.length, early=chunk.length * self._copy_s)
        return self._bytes[at : at + chunk.length]

    def close(self) -> None:
        """Do nothing: no file is open."""
