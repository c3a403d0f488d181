"""Waits for numbers that a kernel writes to the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from greenroom.errors import DeviceError

PATIENCE = 1000  # looks at a report before the device is asked whether it still works


Report = TypeVar("Report")


def wait_for_report(read: Callable[[], Report | None], is_idle: Callable[[], bool]) -> Report:
    """Wait for a report; `read` returns it, or None while it is not there.

    Raises DeviceError if the device has done all work without it (`is_idle`).
    """
    looks = 0
    while (report := read()) is None:
        looks += 1
        if looks % PATIENCE == 0 and is_idle() and read() is None:
            raise DeviceError("the GPU failed: it has not reported a token's experts")
        time.sleep(0)  # threads that move experts need Python's lock
    return report
