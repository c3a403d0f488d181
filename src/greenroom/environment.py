"""Environment variables for torch and OpenMP, set before torch is imported; the platform."""

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
    """Raise PlatformError unless Linux runs: reads, memory and locks need its calls."""
    if sys.platform != "linux":
        raise PlatformError(
            f"Greenroom runs on Linux only, and this is {sys.platform}: use a Linux machine, a"
            " container, or WSL 2 on Windows"
        )


def limit_spinning() -> None:
    """Make idle OpenMP threads spin briefly, then sleep; the user's own settings stay.

    Readers and compute threads share the cores. A long spin takes a core from the readers
    while experts are loaded; threads that sleep at once cost 30 microseconds at each of the
    hundred parallel regions of a token. OpenMP reads this as its library is loaded, with torch, and
    has no call that changes it later.
    """
    global _late
    if "OMP_WAIT_POLICY" not in os.environ:
        _late = "torch" in sys.modules and "GOMP_SPINCOUNT" not in os.environ
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # other libraries than GNU's know only this
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def late_import_warning() -> str:
    """Return the warning that torch was imported before OpenMP's settings; else an empty string."""
    global _late
    late, _late = _late, False
    return LATE if late else ""


def request_large_pages() -> None:
    """Let torch use memory pages of 2 MiB for large tensors; user settings stay.

    This serves weights that transformers converts. Weights that are read as stored get large pages
    in runtime/memory/arena.py.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
