"""Waits for numbers that a kernel writes to the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from greenroom.errors import DeviceError

PATIENCE = 1000  # looks at a report before the device is asked whether it still works


def wait_for_report(is_there: Callable[[], bool], is_idle: Callable[[], bool]) -> None:
    """Wait until a report is there.

    Raises DeviceError if the device has done all work without it (`is_idle`).
    """
    looks = 0
    while not is_there():
        looks += 1
        if looks % PATIENCE == 0 and is_idle() and not is_there():
            raise DeviceError("the GPU failed: it has not reported a token's experts")
        time.sleep(0)  # threads that move experts need Python's lock
