"""Sizes of free and used memory, reservations of memory, and its release."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from greenroom.errors import DeviceError

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
KIB = 1024
LARGE_PAGE = 2 << 20  # bytes
_NORESERVE = 0x4000  # mmap has no name for it before Python 3.13


def available_bytes() -> int:
    """Return the bytes available to this process: the machine's or its cgroup's.

    The smaller number counts.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms()])


def _cgroup_rooms() -> list[int]:
    """List the free bytes of each cgroup of this process, v1 and v2.

    Limit minus usage without page cache.
    """
    rooms = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "file")
            elif "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup/memory")
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
            else:
                continue
            folder = root / path.strip("/")
            while folder == root or root in folder.parents:
                rooms += _room(folder, *files)
                folder = folder.parent
    return rooms


def _room(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> list[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if not limit.isdigit():  # "max"
        return []
    return [max(int(limit) - usage + int(stat.get(cache_key, 0)), 0)]


def rss_bytes() -> int:
    """Return the bytes of memory that this process and its helper processes hold.

    Budgets, the start-up line, the closing line and statistics all use this count. Pages of library
    files count once, as this process maps them; of a helper process only private pages count. A
    memory cgroup counts the same pages, and the page cache of unmapped files, which the kernel
    reclaims where memory is short.
    """
    return _status_bytes("self", "VmRSS") + _helpers_bytes()


def peak_rss_bytes() -> int:
    """Return this process's peak memory in bytes since its start, with its helper processes."""
    peak = _status_bytes("self", "VmHWM")
    return (peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB) + _helpers_bytes()


def _helpers_bytes() -> int:
    """Sum the private and shared-memory bytes of the living child processes."""
    nbytes = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in path.read_text().split():
                nbytes += _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")
    return nbytes


def _status_bytes(pid: str, name: str) -> int:
    """Return a field of /proc/PID/status in bytes; 0 without the process or field."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    return 0


def reserve_memory(nbytes: int, large_pages: bool = False) -> mmap.mmap:
    """Reserve address space, whose pages take memory only once they are written.

    Pages have the smallest size, or with `large_pages` the largest that the system has. The space
    is freed with its last view. DeviceError if there is not enough.
    """
    try:
        space = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(f"no address space for {nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them has none to refuse
        space.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return space


def advise_large_pages(space: mmap.mmap, start: int, nbytes: int) -> None:
    """Request pages of 2 MiB for the aligned part of a memory reservation."""
    if nbytes:
        with contextlib.suppress(OSError, AttributeError):
            space.madvise(mmap.MADV_HUGEPAGE, start, nbytes)


def trim_heap() -> None:
    """Return freed heap pages, which glibc would keep, to the operating system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """Collect Python's garbage, and return freed heap pages to the operating system."""
    gc.collect()
    trim_heap()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector during the block.

    While a model is built and kernels are compiled it takes a fifth of the time, since it visits a
    million objects of the libraries again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
