"""Refusals of the operating system: memory or a thread that it does not give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from greenroom.errors import DeviceError

# The messages of Python and of torch's allocator.
THREAD = "can't start new thread"
MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def refusal_of(error: BaseException) -> DeviceError | None:
    """Return what an exception says about memory or a thread that was refused, or None."""
    if isinstance(error, RuntimeError) and THREAD in str(error):
        return DeviceError(
            "the operating system refuses a new thread: end other programs, or raise the limit"
            " (ulimit -u, TasksMax of a systemd unit, pids.max of a cgroup)"
        )
    size = MEMORY.search(str(error)) if isinstance(error, RuntimeError) else None
    if size is None and not isinstance(error, MemoryError):
        return None
    amount = f"{int(size[1]):,} bytes of memory" if size is not None else "memory"
    return DeviceError(
        f"the operating system refuses {amount}: ask for less (--memory), end other programs, or"
        " raise the limit (ulimit -v)"
    )


@contextmanager
def name_refusals() -> Iterator[None]:
    """Raise DeviceError where the operating system refuses memory or a thread."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (refusal := refusal_of(error)) is None:
            raise
        raise refusal from error
