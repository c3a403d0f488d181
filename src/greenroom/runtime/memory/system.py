"""Sizes of free and used memory, reservations of memory, and its release."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from greenroom.errors import DeviceError
from greenroom.runtime.memory.cgroups import MemoryCgroup, memory_cgroups

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
KIB = 1024
LARGE_PAGE = 2 << 20  # bytes
_NORESERVE = 0x4000  # mmap has no name for it before Python 3.13


def available_bytes(cgroups: Sequence[MemoryCgroup] | None = None) -> int:
    """Return how many bytes of memory are available to this process.

    This is the smallest of the machine's available memory and the free memory of the process's
    cgroups, which are looked up unless they are given.
    """
    groups = memory_cgroups() if cgroups is None else cgroups
    free = (each.free_bytes() for each in groups)
    in_cgroups = [nbytes for nbytes in free if nbytes is not None]
    return min([int(psutil.virtual_memory().available), *in_cgroups])


def rss_bytes() -> int:
    """Return how many bytes of memory this process and its helper processes hold.

    Helper processes are the living children. Of this process all resident pages count, also those
    of mapped library files; of a helper process anonymous and shared-memory pages count. A memory
    cgroup counts the same pages, and the page cache of unmapped files, which the kernel reclaims if
    memory is short. Budgets, the start-up line, the closing line and statistics use this count.
    """
    return own_rss_bytes() + _helpers_bytes()


def own_rss_bytes() -> int:
    """Return how many bytes of memory this process holds, without its helper processes."""
    return _status_bytes("self", "VmRSS")


def peak_rss_bytes() -> int:
    """Return this process's peak memory in bytes since its start, with its helper processes.

    A helper process (a living child) counts with its present memory.
    """
    peak = _status_bytes("self", "VmHWM")
    return (peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB) + _helpers_bytes()


def _helpers_bytes() -> int:
    """Return the sum of anonymous and shared-memory bytes of the living child processes."""
    nbytes = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in path.read_text().split():
                nbytes += _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")
    return nbytes


def _status_bytes(pid: str, name: str) -> int:
    """Return a field of /proc/PID/status in bytes; 0 if there is no such process or field."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    return 0


def reserve_memory(nbytes: int, large_pages: bool = False) -> mmap.mmap:
    """Reserve address space, whose pages take memory only once they are written.

    Pages have the system's normal size; with `large_pages` the system is asked for transparent huge
    pages. The space is freed when the last array that views it is deleted. Raises DeviceError if
    there is not enough address space.
    """
    try:
        space = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(
            f"no address space for {nbytes} bytes of memory ({error}): ask for less memory, or"
            " raise the limit (ulimit -v)"
        ) from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them has none to refuse
        space.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return space


def advise_large_pages(space: mmap.mmap, start: int, nbytes: int) -> None:
    """Ask the system for pages of 2 MiB in a part of reserved memory.

    `start` and `nbytes` are multiples of 2 MiB. If `nbytes` is 0, nothing is done.
    """
    if nbytes:
        with contextlib.suppress(OSError, AttributeError):
            space.madvise(mmap.MADV_HUGEPAGE, start, nbytes)


def trim_heap() -> None:
    """Return freed heap pages, which glibc caches, to the operating system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """Collect Python's garbage, and return freed heap pages to the operating system."""
    gc.collect()
    trim_heap()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector within this context.

    While a model is built and its policy is compiled, the collector takes a fifth of the time,
    since it visits a million objects of the libraries again and again. `gc.collect` within this
    context visits only objects that were made in it: visiting all takes half a second.
    """
    enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freezes:  # otherwise the program itself has frozen objects, and they must stay frozen
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()
