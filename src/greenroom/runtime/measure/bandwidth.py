"""Measurements of the bandwidth of memory and disk, in bytes a second.

The disk is read past the page cache (O_DIRECT), as experts are read in a run. If the file system
refuses, the files are dropped from the page cache and read through it.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.cost import Link
from greenroom.errors import OutputError
from greenroom.interrupts import undo_on_interrupt
from greenroom.runtime.store.disk import BLOCK, Staging, open_direct

RAM_BYTES = 512 << 20
READ_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
READ_THREADS = (1, 2, 4)

Reads = Mapping[tuple[int, int], float]  # (bytes of a read, threads) -> bytes a second


def run_threads(work: Sequence[Callable[[], Any]]) -> float:
    """Run each function in its own thread; return the seconds until all have ended.

    Raises the error of the first function that failed.
    """
    with ThreadPoolExecutor(len(work)) as threads:
        start = time.perf_counter()
        for each in [threads.submit(part) for part in work]:
            each.result()
        return time.perf_counter() - start


@jit(fastmath=True)
def _total(values: np.ndarray) -> int:
    """Sum int64 values, with one addition for eight bytes, so memory limits the speed."""
    result = 0
    for i in range(values.size):
        result += values[i]
    return result


def ram_bandwidth(threads: int, passes: int = 12, nbytes: int = RAM_BYTES) -> float:
    """Measure the bandwidth of memory reads by `threads` threads, in bytes a second.

    The threads read `nbytes` bytes `passes` times; the best pass counts.
    """
    values = np.ones(nbytes // 8, np.int64)
    parts = np.array_split(values, threads)
    _total(parts[0][:8])

    def one_pass() -> float:
        return run_threads([lambda part=part: _total(part) for part in parts])  # type: ignore[misc]

    return float(values.nbytes / min(one_pass() for _ in range(passes)))


def drop_page_cache(files: Sequence[Path]) -> None:
    """Drop files from the OS page cache, except for pages that a process maps."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def reads_directly(path: Path) -> bool:
    """Check whether a file's file system supports direct reads (O_DIRECT)."""
    try:
        os.close(open_direct(str(path)))
    except (OSError, AttributeError):
        return False
    return True


def disk_bandwidth(
    files: Sequence[Path],
    size: int,
    threads: int,
    direct: bool,
    most_bytes: int = 1_200_000_000,
    seconds: float = math.inf,
) -> float:
    """Measure a disk's bandwidth by random reads of uncached blocks, in bytes a second.

    `threads` threads read blocks of `size` bytes, rounded up to a multiple of 4 KiB. The
    measurement ends after `most_bytes` or `seconds`, or when every block has been read once, so no
    block is in a cache because of an earlier read. Raises OSError if a read fails.
    """
    size = -(-size // BLOCK) * BLOCK
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    drop_page_cache(files)
    handles: list[int] = []
    done = [0] * threads
    try:
        handles += [os.open(path, flags) for path in files]
        places = [
            (handle, block * size)
            for handle, path in zip(handles, files, strict=True)
            for block in range(path.stat().st_size // size)
        ]
        random.Random(threads).shuffle(places)
        places = places[: most_bytes // size]
        if not direct:
            for handle in handles:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        end = time.perf_counter() + seconds

        def read(reader: int) -> None:
            buffer = Staging(size).view
            for handle, offset in places[reader::threads]:
                if os.preadv(handle, [buffer], offset) != size:
                    raise OSError(
                        errno.EIO, "a file became shorter during the measurement: measure again"
                    )
                done[reader] += size
                if time.perf_counter() > end:
                    return

        elapsed = run_threads([lambda i=i: read(i) for i in range(threads)])  # type: ignore[misc]
    finally:
        for handle in handles:
            os.close(handle)
    return sum(done) / elapsed


@contextmanager
def noise_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """Create a file of random bytes in a folder, for disk measurements within this context.

    Raises OutputError if the file cannot be written.
    """
    noise = np.random.default_rng(0).bytes(4 << 20)
    try:
        handle, name = tempfile.mkstemp(prefix=".greenroom-", dir=folder)
    except OSError as error:
        raise OutputError(f"cannot write a test file in {folder}: {error.strerror}") from error
    try:
        with undo_on_interrupt(partial(os.unlink, name)), os.fdopen(handle, "wb") as file:
            for i in range(-(-nbytes // len(noise))):
                file.write(i.to_bytes(8, "little") + noise[8:])  # all blocks differ
            file.flush()
            os.fsync(file.fileno())
            yield Path(name)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"no room for a test file of {nbytes >> 20} MiB in {folder} ({error.strerror}):"
                " give another folder with --path"
            ) from error
        raise
    finally:
        with suppress(OSError):
            os.unlink(name)


def fit_link(reads: Reads) -> Link:
    """Fit the cost model of a link (bandwidth, latency, lanes) to measured disk reads.

    bandwidth: the best measured bandwidth
    latency: median time of a single thread's read, minus the time of its bytes at that bandwidth
    lanes: the fewest threads that reach 95 % of the best bandwidth, with reads of the largest size
    """
    bandwidth = max(reads.values())
    largest = max(size for size, _ in reads)
    latencies = [size / rate - size / bandwidth for (size, n), rate in reads.items() if n == 1]
    full = {n: rate for (size, n), rate in reads.items() if size == largest}
    lanes = min(n for n, rate in full.items() if rate >= 0.95 * max(full.values()))
    return Link(bandwidth, statistics.median(latencies), lanes)


def host_facts() -> dict[str, Any]:
    """Return this machine's processor, memory, system, torch version and present load."""
    import torch

    info = ""
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in flags if re.search(rf"\b{flag}\b", info)],
        "memory_bytes": int(psutil.virtual_memory().total),
        "available_bytes": int(psutil.virtual_memory().available),
        "system": platform.platform(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
