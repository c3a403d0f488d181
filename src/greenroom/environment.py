"""Set environment variables for torch and OpenMP, and check the operating system."""

from __future__ import annotations

import os
import sys

from greenroom.errors import PlatformError

SPINS = 20_000  # about 0.3 ms: longer than from one parallel region to the next within a token
LATE = (
    "torch was imported before greenroom, so OpenMP's threads spin after their work and take the"
    " cores from the threads that read experts: import greenroom first, or set"
    f" OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT={SPINS}"
)
_late = False  # OpenMP started without these settings, and nobody was warned yet


def check_platform() -> None:
    """Raise PlatformError unless the operating system is Linux."""
    if sys.platform != "linux":
        raise PlatformError(
            f"Greenroom runs on Linux only, and this is {sys.platform}: use a Linux machine, a"
            " container, or WSL 2 on Windows"
        )


def limit_spinning() -> None:
    """Let idle OpenMP threads spin briefly before they sleep, unless OMP_WAIT_POLICY is set.

    Threads that read experts share the cores with OpenMP's compute threads. A compute thread that
    spins for long keeps a core from the readers. Without any spin, each of the about 100 parallel
    regions that compute one token would start 30 microseconds later, until the threads are awake.
    OpenMP reads the environment variables once, when torch loads its library.
    """
    global _late
    if "OMP_WAIT_POLICY" not in os.environ:
        _late = "torch" in sys.modules and "GOMP_SPINCOUNT" not in os.environ
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # other libraries than GNU's know only this
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def late_import_warning() -> str:
    """Return a warning if torch was imported before greenroom; else an empty string.

    OpenMP then has not read the settings of `limit_spinning`. Only the first call returns the
    warning.
    """
    global _late
    late, _late = _late, False
    return LATE if late else ""


def request_large_pages() -> None:
    """Let torch use memory pages of 2 MiB for large tensors, unless THP_MEM_ALLOC_ENABLE is set.

    The pages are for weights whose type or layout transformers changes while it loads them. Weights
    that stay as the checkpoint stores them get large pages in runtime/memory/arena.py.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
