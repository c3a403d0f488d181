"""Read one file within limits of memory and time: None, or what is wrong with how it is refused."""

from __future__ import annotations

import ctypes
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from greenroom.errors import GreenroomError

ROOM = 200 << 20  # bytes that reading may ask for
SECONDS = 1.0  # of this process's CPU time; other work on the machine does not count
LONGEST_LINE = 1500  # characters
M_ARENA_MAX = -8  # of glibc's mallopt: a new thread would reserve 64 MiB for memory of its own


class TooLong(BaseException):
    """Reading took longer than SECONDS. No reader catches it as one of its own errors."""


def fault(read: Callable[[bytes, Path], None], data: bytes, folder: Path) -> str | None:
    """What is wrong with how `data` is read: anything but success, or one error in one line.

    Within `limits`. What takes too long is read again: the collector of garbage may have worked.
    """
    for _ in range(2):
        found = _fault(read, data, folder)
        if found is None or TooLong.__name__ not in found:
            break
    return found


def _fault(read: Callable[[bytes, Path], None], data: bytes, folder: Path) -> str | None:
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            read(data, folder)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except GreenroomError as error:
        line = str(error)
        if not line.strip() or len(line.splitlines()) > 1 or len(line) > LONGEST_LINE:
            return f"the message is no single short line: {line[:300]!r}"
        if out_of_memory(error):
            return f"more than {ROOM >> 20} MiB were asked for: {line[:300]}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return traceback.format_exc()
    return None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error was made of one that says that memory is short."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def limits() -> Iterator[None]:
    """No more than ROOM of address space, and SECONDS of CPU time for each file, inside.

    Warnings of NumPy, which a user would see, are errors.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _too_long(*_: object) -> None:
    raise TooLong(f"more than {SECONDS:g} s")
