"""The kernels' source as a number, and where their machine code is kept."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def stamp() -> int:
    """A number for the source of all kernels.

    Numba's cache looks at one file's date, so an edit of another file would be missed. As a
    variable that the compiled function closes over, this number is part of the cache's key.
    """
    sources = [path.read_bytes() for path in sorted(HERE.glob("*.py"))]
    return int.from_bytes(hashlib.sha256(b"".join(sources)).digest()[:7], "little")


def folder() -> Path:
    """Where Numba keeps machine code, or would if it could be written."""
    return Path(os.environ.get("NUMBA_CACHE_DIR") or HERE / "__pycache__")
