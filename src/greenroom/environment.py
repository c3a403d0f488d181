"""What torch and OpenMP read in the environment, set before torch is imported; the platform."""

from __future__ import annotations

import os
import sys

from greenroom.errors import PlatformError

SPINS = 20_000  # about 0.3 ms: longer than from one parallel region to the next within a token
LATE = (
    "torch was imported before greenroom, so OpenMP's threads spin after their work and take the"
    " cores from those that read experts: import greenroom first, or set OMP_WAIT_POLICY=PASSIVE"
    f" GOMP_SPINCOUNT={SPINS}"
)
_late = False  # did OpenMP start without these settings, and has nobody been warned?


def check_platform() -> None:
    """PlatformError anywhere but on Linux: reads, memory and the compiled files' locks are its."""
    if sys.platform != "linux":
        raise PlatformError(
            f"Greenroom runs on Linux only, and this is {sys.platform}: take a Linux machine, a"
            " container, or WSL 2 on Windows"
        )


def limit_spinning() -> None:
    """Let threads without work spin for a moment, then sleep; the user's own settings stay.

    Readers and compute share the cores. Threads that spin for long take one from the readers
    while experts are awaited; threads that sleep at once cost 30 microseconds at each of the
    hundred parallel regions of a token. OpenMP reads this as its library is loaded, with torch, and
    has no call that changes it later.
    """
    global _late
    if "OMP_WAIT_POLICY" not in os.environ:
        _late = "torch" in sys.modules and "GOMP_SPINCOUNT" not in os.environ
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # other libraries than GNU's know only this
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def late_import_warning() -> str:
    """What to say where the settings came too late; "" where they did not, and after that."""
    global _late
    late, _late = _late, False
    return LATE if late else ""


def request_large_pages() -> None:
    """Let torch ask for pages of 2 MiB for large tensors, such as weights that transformers
    converts (those that are read as they are have theirs, runtime/memory/arena.py); the user's own
    setting stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
