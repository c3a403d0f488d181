"""Reader of byte ranges of files, each of which is read once.

Large ranges are read directly (O_DIRECT), through an aligned buffer: in the page cache they would
take memory a second time, and writing to new pages takes longer than reading from a fast disk.
Small ranges, and files whose file system refuses direct reads, are read through the page cache, and
their pages are then dropped from it.
"""

from __future__ import annotations

import errno
import os
import threading
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from greenroom.runtime.store.disk import BLOCK, CHUNK_BYTES, Staging

LEAST_DIRECT = 1 << 20  # bytes of a range
_local = threading.local()  # a buffer for each thread


class RangeReader:
    """Sequential reader of one byte range of a file, as a context manager.

    All methods raise OSError if the file cannot be read.
    """

    def __init__(self, path: str, offset: int, nbytes: int) -> None:
        self._path, self._at, self._range = path, offset, (offset, nbytes)
        self._is_direct = nbytes >= LEAST_DIRECT and hasattr(os, "O_DIRECT")
        self._file = self._open()

    def _open(self) -> int:
        if self._is_direct:
            try:
                return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._is_direct = False
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self._is_direct:
                os.posix_fadvise(self._file, *self._range, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(self._file)

    def fill(self, into: NDArray[np.uint8]) -> bool:
        """Read the next `into.size` bytes of the file; False if the file ends before."""
        while into.size:
            part = into[:CHUNK_BYTES]
            if not (self._fill_directly(part) if self._is_direct else self._fill_buffered(part)):
                return False
            into = into[part.size :]
            self._at += part.size
        return True

    def _fill_buffered(self, into: NDArray[np.uint8]) -> bool:
        view, at = memoryview(into.data), self._at
        while view:
            if not (n := os.preadv(self._file, [view], at)):
                return False
            view, at = view[n:], at + n
        return True

    def _fill_directly(self, into: NDArray[np.uint8]) -> bool:
        staging = getattr(_local, "staging", None)
        if staging is None:
            staging = _local.staging = Staging()
        begin, end = self._at, self._at + into.size
        first, last = begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
        buffer, done = staging.take(last - first), 0
        try:
            while first + done < end:
                n = os.preadv(self._file, [buffer[done : last - first]], first + done)
                done += n
                if n == 0 or (n % BLOCK and first + done < end):
                    return False
        except OSError as error:  # some file systems accept O_DIRECT in open only
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            os.close(self._file)
            self._is_direct = False
            self._file = self._open()
            return self._fill_buffered(into)
        into[:] = staging.array[begin - first : end - first]
        return True
