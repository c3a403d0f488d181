"""How much memory there is, how much this process holds, and giving back what is free."""

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
    """What this process could take now: the machine's free memory or its cgroup's, if less."""
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms()])


def _cgroup_rooms() -> list[int]:
    """Limit minus usage (page cache not counted) of the cgroups this process is in, v1 and v2."""
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
    """Memory that this process and its helper processes hold now.

    This is the one count of memory: budgets, the start-up line, the closing line and statistics go
    by it. Pages of libraries' files count once, as this process has them mapped; of a helper
    process only its own pages count. A memory cgroup counts the same pages, and also the page
    cache of files that nobody maps, which the kernel takes back where memory is short.
    """
    return _status_bytes("self", "VmRSS") + _helpers_bytes()


def peak_rss_bytes() -> int:
    """The most that this process has held since it started, with its helper processes."""
    own = _status_bytes("self", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return own + _helpers_bytes()


def _helpers_bytes() -> int:
    """Pages of their own that the children that live now hold."""
    found = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in path.read_text().split():
                found += _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")
    return found


def _status_bytes(pid: str, name: str) -> int:
    """A field of /proc/PID/status in bytes; 0 where the process or the field is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    return 0


def reserve_memory(nbytes: int, large_pages: bool = False) -> mmap.mmap:
    """Address space whose pages are there once they are written, by pages of the smallest size or,
    where the system has them, of the largest.

    It goes back with its last reader. DeviceError where there is not so much.
    """
    try:
        space = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(f"no address space for {nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them has none to refuse
        space.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return space


def advise_large_pages(space: mmap.mmap, start: int, nbytes: int) -> None:
    """Pages of 2 MiB for a part of a reservation, which begins and ends at such a page's edge."""
    if nbytes:
        with contextlib.suppress(OSError, AttributeError):
            space.madvise(mmap.MADV_HUGEPAGE, start, nbytes)


def trim_heap() -> None:
    """Return freed heap pages to the system (glibc keeps them otherwise)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """Collect garbage and return freed heap pages to the system (glibc keeps them otherwise)."""
    gc.collect()
    trim_heap()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's garbage collector, which would walk a million objects of the libraries
    again and again while a model is built and kernels are compiled: a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
