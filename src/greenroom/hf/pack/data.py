"""The file of a pack's experts, written in any order, past the page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from greenroom.hf.checkpoint.pack.format import BLOCK, Header
from greenroom.hf.checkpoint.pack.journal import KEPT, writing
from greenroom.runtime.slots.host import HostSlots


class Data:
    """The data file, written past the page cache where the file system has that. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._direct = True
        self._fd = self._open()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with writing(self.path, KEPT):
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
            self._direct = False
            return os.open(self.path, flags, 0o666)

    def begin(self, header: Header) -> None:
        """Write the first block."""
        first = HostSlots(1, BLOCK)
        first.bytes(0)[:] = np.frombuffer(header.first_block(), np.uint8)
        self.write(first.bytes(0), 0)
        first.close()

    def write(self, data: np.ndarray, at: int) -> None:
        """Write whole blocks at a block's beginning, from memory that is aligned likewise."""
        view, done = memoryview(data), 0  # type: ignore[arg-type]
        with writing(self.path, KEPT):
            while done < len(view):
                n = os.pwritev(self._fd, [view[done:]], at + done)
                n -= n % BLOCK if self._direct else 0
                if n == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += n

    def sync(self) -> None:
        """All that was written is on disk when this returns."""
        with writing(self.path, KEPT):
            os.fdatasync(self._fd)
            if not self._direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
