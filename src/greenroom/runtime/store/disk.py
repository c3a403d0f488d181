"""The store: a read-only mapping from piece to bytes, over the checkpoint's own files.

Reads are direct (O_DIRECT) into an aligned staging buffer, so that the page cache holds no second
copy of the experts and the budget is kept; where the file system refuses direct reads they are
buffered, and what was read is dropped from the page cache at once.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import NamedTuple

import numpy as np

from greenroom.core.layout import Catalog, Extent
from greenroom.errors import CheckpointChanged, CheckpointError, StoreError
from greenroom.runtime.memory.system import LARGE_PAGE, advise_large_pages, reserve_memory
from greenroom.runtime.store.stamps import Stamp, stamp_of

BLOCK = 4096  # bytes; what direct reads are aligned to: offset, length and memory
CHUNK_BYTES = 4 << 20  # 1 to 4 MiB reach the disk's speed and keep a new demand's wait short


class Chunk(NamedTuple):
    """Bytes `start .. start + length` of an extent."""

    extent: Extent
    start: int
    length: int


def cut(extent: Extent, chunk_bytes: int) -> list[Chunk]:
    """An extent in chunks of about equal size; one that must be transformed stays whole."""
    parts = -(-extent.length // chunk_bytes) if extent.divisible else 1
    size = -(-extent.length // parts // BLOCK) * BLOCK if parts > 1 else extent.length
    return [
        Chunk(extent, start, min(size, extent.length - start))
        for start in range(0, extent.length, size)
    ]


def open_direct(path: str) -> int:
    """A file past the page cache. OSError; some file systems take O_DIRECT and refuse the read."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BLOCK) as block:
            os.preadv(fd, [block], 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class Staging:
    """A page-aligned buffer: of its own, which grows to what is asked of it, or `memory`.

    Its own lies in pages of 2 MiB where the system has them: the disk then writes to a few long
    runs of memory and not to a thousand short ones, and is read up to twice as fast (docs/log/).
    """

    def __init__(
        self, nbytes: int = CHUNK_BYTES + 2 * BLOCK, memory: np.ndarray | None = None
    ) -> None:
        if memory is None:
            self._allocate(nbytes)
        else:
            self.array, self.view = memory, memoryview(memory)  # type: ignore[arg-type]

    def _allocate(self, nbytes: int) -> None:
        """What is left over after the last large page is in small ones, and takes no more."""
        nbytes = -(-nbytes // BLOCK) * BLOCK
        space = reserve_memory(nbytes + LARGE_PAGE)
        at = -np.frombuffer(space, np.uint8).ctypes.data % LARGE_PAGE
        advise_large_pages(space, at, nbytes // LARGE_PAGE * LARGE_PAGE)
        self.view = memoryview(space)[at : at + nbytes]
        self.array = np.frombuffer(self.view, np.uint8)

    def take(self, nbytes: int) -> memoryview:
        """The first `nbytes` (a multiple of the block size)."""
        if nbytes > len(self.view):
            self._allocate(nbytes)
        return self.view[:nbytes]


class DiskStore:
    """Experts of a catalog, read in chunks. Thread-safe: every reader brings its own staging.

    A file that is changed while it is open ends all reading: bytes of two states of a checkpoint
    are no expert's. After each chunk the stamp of its file is compared (one fstat beside a read of
    up to CHUNK_BYTES), so no chunk is given out that was read after a change.
    """

    def __init__(
        self, catalog: Catalog, *, chunk_bytes: int = CHUNK_BYTES, direct: str = "auto"
    ) -> None:
        """`direct`: "auto" turns to buffered reads where the file system refuses; "on" fails."""
        self.catalog, self.chunk_bytes = catalog, chunk_bytes
        self._chunks: dict[int, tuple[Chunk, ...]] = {}
        self._files: list[int] = []
        self._stamps: list[Stamp] = []
        self._changed: str | None = None  # what is said of a file that has changed
        self.direct: bool = direct != "off" and hasattr(os, "O_DIRECT")
        try:
            for path in catalog.files:
                self._files.append(self._open(path, strict=direct == "on"))
            self._stamps = [stamp_of(fd) for fd in self._files]
        except BaseException:
            self.close()
            raise

    def _open(self, path: str, strict: bool) -> int:
        try:
            if self.direct:
                try:
                    return open_direct(path)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOTSUP) or strict:
                        raise
                    self._all_buffered()
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def _all_buffered(self) -> None:
        """One mode for all files: reopen those that were opened directly."""
        self.direct = False
        for i, fd in enumerate(self._files):
            os.close(fd)
            self._files[i] = os.open(self.catalog.files[i], os.O_RDONLY | os.O_CLOEXEC)

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]:
        """An expert's chunks, in the order in which they are read."""
        chunks = self._chunks.get(expert_id)
        if chunks is None:
            extents = self.catalog.extents(expert_id)
            chunks = tuple(c for e in extents for c in cut(e, self.chunk_bytes))
            self._chunks[expert_id] = chunks
        return chunks

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        """A chunk's bytes: [length] uint8, a view of the staging buffer, valid until its next use.

        StoreError where the disk fails; CheckpointChanged where a file was changed since it was
        opened, also by every read after that.
        """
        if self._changed is not None:
            raise CheckpointChanged(self._changed)
        begin = chunk.extent.offset + chunk.start
        end = begin + chunk.length
        first = begin // BLOCK * BLOCK if self.direct else begin
        last = -(-end // BLOCK) * BLOCK if self.direct else end
        buffer, done = staging.take(-(-(last - first) // BLOCK) * BLOCK), 0
        path = self.catalog.files[chunk.extent.file]
        try:
            fd, stamp = self._files[chunk.extent.file], self._stamps[chunk.extent.file]
            while first + done < end:
                n = os.preadv(fd, [buffer[done : last - first]], first + done)
                done += n
                if n == 0 or (self.direct and n % BLOCK and first + done < end):
                    break
            if not self.direct:
                os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
            same = stamp_of(fd) == stamp
        except OSError as error:
            raise StoreError(f"cannot read {path} at byte {begin}: {error.strerror}") from error
        if not same:
            self._changed = f"{path} was changed while it was served: load the model again"
            raise CheckpointChanged(self._changed)
        if first + done < end:
            raise StoreError(f"{path} ends early: byte {end} is not there")
        return staging.array[begin - first : end - first]

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files.clear()
