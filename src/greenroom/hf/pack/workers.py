"""Threads that pack experts: each reads an expert, encodes it and writes it to a pack."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from greenroom.core.layout import Catalog
from greenroom.hf.checkpoint.pack.checked import disk_store
from greenroom.hf.checkpoint.pack.format import BLOCK, PackHeader, PackLayer
from greenroom.hf.checkpoint.pack.journal import RESUME_HINT, write_errors
from greenroom.hf.pack.target import ExpertPacker
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Staging

BUFFERS = 768 << 20  # bytes of experts in progress, unless a single one takes more


def write_experts(
    catalog: Catalog,
    layers: Sequence[PackLayer],
    packers: Sequence[Sequence[ExpertPacker]],
    data: ExpertsFile,
    todo: Sequence[int],
) -> Generator[tuple[int, tuple[int, ...]], None, None]:
    """Encode experts and write them to a pack in threads; yield (expert id, checksums).

    catalog: where the source's experts lie
    layers:  where the packed experts go
    packers: the encoders of each layer's experts
    data:    the pack's data file
    todo:    the ids of the experts to write; results are in this order

    Each thread has buffers for one source expert and one packed expert.
    """
    stride = max(layer.stride for layer in layers)
    store = disk_store(catalog)
    longest = max(c.length for e in (0, catalog.experts - 1) for c in store.chunks(e))
    each = catalog.slot_bytes + stride + longest
    count = max(1, min((os.cpu_count() or 1) + 1, BUFFERS // each, catalog.experts))
    opened = ExitStack()
    opened.callback(store.close)
    local = threading.local()

    def begin() -> None:
        local.slot, local.staging = next(buffers)

    def make(expert_id: int) -> tuple[int, tuple[int, ...]]:
        slot: int = local.slot
        for chunk in store.chunks(expert_id):
            sources.write(slot, chunk.extent.copies, store.read(chunk, local.staging), chunk.start)
        number = catalog.layer_of(expert_id)
        layer, expert = layers[number], expert_id - catalog.offsets[number]
        target = targets.bytes(slot)[: layer.stride]
        target.fill(0)
        for packer in packers[number]:
            packer(partial(sources.tensor, slot), partial(targets.tensor, slot), expert)
        data.write(target, layer.place(expert))
        return expert_id, layer.checksums_of(target.data)

    with opened:  # closed once no thread writes any more
        sources, targets = HostSlots(count, catalog.slot_bytes), HostSlots(count, stride)
        opened.callback(sources.close)
        opened.callback(targets.close)
        buffers = iter([(slot, Staging()) for slot in range(count)])
        opened.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # there is a thread for each core already
        with ThreadPoolExecutor(count, "pack", begin) as pool:
            yield from pool.map(make, todo)


class ExpertsFile:
    """Thread-safe writer of a pack's data file.

    Blocks may be written in any order. Writes bypass the page cache if the file system supports
    O_DIRECT.
    """

    def __init__(self, path: Path, header: PackHeader) -> None:
        """Open or create a pack's data file and write the first block.

        Raises OutputError if the file cannot be written.
        """
        self.path = path
        self._direct = True
        self._fd = self._open()
        try:
            with mmap.mmap(-1, BLOCK) as first:
                first[:] = header.first_block()
                self.write(first, 0)
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with write_errors(self.path, RESUME_HINT):
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
            self._direct = False
            return os.open(self.path, flags, 0o666)

    def write(self, data: np.ndarray | mmap.mmap, at: int) -> None:
        """Write blocks of 4096 bytes to a pack's data file, from byte `at` on.

        The length, `at` and the memory address must be multiples of 4096.
        Raises OutputError if the file cannot be written, as on a full disk.
        """
        done = 0
        # Released after an error too: `data` cannot be closed while a view of it is alive.
        with memoryview(data) as view, write_errors(self.path, RESUME_HINT):  # type: ignore[arg-type]
            while done < len(view):
                n = os.pwritev(self._fd, [view[done:]], at + done)
                n -= n % BLOCK if self._direct else 0
                if n == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += n

    def sync(self) -> None:
        """Flush all data written to a pack's data file to disk; raise OutputError on failure."""
        with write_errors(self.path, RESUME_HINT):
            os.fdatasync(self._fd)
            if not self._direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> ExpertsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
