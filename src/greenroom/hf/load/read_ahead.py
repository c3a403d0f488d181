"""Read dense weights into the page cache while the rest of a start-up computes.

Building the tokenizer and compiling kernels leave the disk idle for about a second. Loading then
finds the dense weights in the page cache, and drops them from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from greenroom.hf.model.skeleton import ModelSkeleton

THREADS = 4  # one thread waits for the disk most of the time
PIECE = 4 << 20  # bytes of a read

Range = tuple[str, int, int]  # path, first byte, number of bytes


def read_ahead(skeleton: ModelSkeleton) -> list[Thread]:
    """Start threads that read a model's dense weights into the page cache.

    Embeddings that stay on disk are left out. Errors are ignored: loading reads the same bytes and
    reports them. The result is the threads, which end when all weights are read.
    """
    pieces: SimpleQueue[Range] = SimpleQueue()
    for each in sorted(_pieces(skeleton)):
        pieces.put(each)
    threads = [Thread(target=_read, args=(pieces,), daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _pieces(skeleton: ModelSkeleton) -> Iterator[Range]:
    """Yield the byte ranges of a model's dense weights, at most PIECE bytes each."""
    checkpoint = skeleton.checkpoint
    for name in skeleton.loaded_tensors:
        for part in checkpoint.tensors[name].parts:
            path, stop = checkpoint.files[part.file], part.offset + part.nbytes
            for start in range(part.offset, stop, PIECE):
                yield path, start, min(PIECE, stop - start)


def _read(pieces: SimpleQueue[Range]) -> None:
    buffer, files = bytearray(PIECE), dict[str, int]()
    try:
        with suppress(OSError, Empty):
            while True:
                path, start, nbytes = pieces.get_nowait()
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.preadv(files[path], [memoryview(buffer)[:nbytes]], start)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
