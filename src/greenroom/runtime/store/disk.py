"""The disk store, which reads experts from the checkpoint's own files.

Reads are direct (O_DIRECT) into an aligned staging buffer, so the page cache does not store a
second copy of the experts beyond the memory budget. If the file system refuses direct reads, reads
are buffered, and the pages are dropped from the page cache at once.
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

BLOCK = 4096  # bytes; alignment of direct reads: offset, length and memory
CHUNK_BYTES = 4 << 20  # 1 to 4 MiB reach the disk's speed and keep a new demand's wait short


class Chunk(NamedTuple):
    """One read of an expert: `length` bytes of an extent from byte `start` of the extent on.

    An extent is a contiguous byte range of a checkpoint's file.
    """

    extent: Extent
    start: int
    length: int


def cut(extent: Extent, chunk_bytes: int) -> list[Chunk]:
    """Cut an extent (a contiguous byte range of a file) into chunks of similar size.

    Chunks have at most about `chunk_bytes`. An extent that is transposed or cast on its way into a
    slot is one chunk.
    """
    parts = -(-extent.length // chunk_bytes) if extent.divisible else 1
    size = -(-extent.length // parts // BLOCK) * BLOCK if parts > 1 else extent.length
    return [
        Chunk(extent, start, min(size, extent.length - start))
        for start in range(0, extent.length, size)
    ]


def open_direct(path: str) -> int:
    """Open a file for direct reads (O_DIRECT), and return its descriptor.

    One block is read, since some file systems accept O_DIRECT in open and refuse it in the read.
    Raises OSError if the file system refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BLOCK) as block:
            os.preadv(fd, [block], 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class Staging:
    """A read buffer aligned for direct reads, which grows for larger reads.

    The buffer lies in pages of 2 MiB if the system has them: the disk then writes to a few long
    runs of memory instead of a thousand short ones, up to twice as fast (docs/log/). A caller that
    passes `memory` has that memory used instead.
    """

    def __init__(
        self, nbytes: int = CHUNK_BYTES + 2 * BLOCK, memory: np.ndarray | None = None
    ) -> None:
        if memory is None:
            self._allocate(nbytes)
        else:
            self.array, self.view = memory, memoryview(memory)  # type: ignore[arg-type]

    def _allocate(self, nbytes: int) -> None:
        """Reserve a read buffer in large pages; the rest after the last one has small pages."""
        nbytes = -(-nbytes // BLOCK) * BLOCK
        space = reserve_memory(nbytes + LARGE_PAGE)
        at = -np.frombuffer(space, np.uint8).ctypes.data % LARGE_PAGE
        advise_large_pages(space, at, nbytes // LARGE_PAGE * LARGE_PAGE)
        self.view = memoryview(space)[at : at + nbytes]
        self.array = np.frombuffer(self.view, np.uint8)

    def take(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of the buffer, which grows if it is smaller."""
        if nbytes > len(self.view):
            self._allocate(nbytes)
        return self.view[:nbytes]


class DiskStore:
    """Reader of a checkpoint's experts in chunks; thread-safe with one buffer a thread.

    If a file is overwritten while it is open, its next read and every later read of any file raise
    CheckpointChanged, since an expert must not mix two states of a checkpoint. The file's size and
    modification time are compared after each chunk, so no chunk is returned that was read after a
    change.
    """

    def __init__(
        self, catalog: Catalog, *, chunk_bytes: int = CHUNK_BYTES, direct: str = "auto"
    ) -> None:
        """Open the checkpoint files that a catalog names.

        `direct` is "on" or "off", or "auto": buffered reads if the file system refuses direct ones.
        Raises CheckpointError if a file cannot be opened.
        """
        self.catalog, self.chunk_bytes = catalog, chunk_bytes
        self._chunks: dict[int, tuple[Chunk, ...]] = {}
        self._files: list[int] = []
        self._stamps: list[Stamp] = []
        self._changed: str | None = None  # the error message, once a file has changed
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
                    self._reopen_buffered()
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def _reopen_buffered(self) -> None:
        """Reopen the files that are open for direct reads, now for buffered reads."""
        self.direct = False
        for i, fd in enumerate(self._files):
            os.close(fd)
            self._files[i] = os.open(self.catalog.files[i], os.O_RDONLY | os.O_CLOEXEC)

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]:
        """Return the chunks of an expert, in the order of their reads."""
        chunks = self._chunks.get(expert_id)
        if chunks is None:
            extents = self.catalog.extents(expert_id)
            chunks = tuple(c for e in extents for c in cut(e, self.chunk_bytes))
            self._chunks[expert_id] = chunks
        return chunks

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        """Read a chunk of an expert into a staging buffer, and return the chunk's bytes.

        The bytes are a view of the buffer, [length] uint8, valid until the buffer's next use.
        Raises StoreError if the disk fails or the file is too short, CheckpointChanged if a file
        changed since it was opened; then every later read raises CheckpointChanged too.
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
            raise StoreError(
                f"cannot read an expert from {path}, at byte {begin}: {error.strerror}"
            ) from error
        if not same:
            self._changed = f"{path} changed while it was in use: load the model again"
            raise CheckpointChanged(self._changed)
        if first + done < end:
            raise StoreError(
                f"{path} is truncated: an expert ends at byte {end}, after the end of the file;"
                " download or copy the file again"
            )
        return staging.array[begin - first : end - first]

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files.clear()
