"""The folder of the compile cache, found without an import of Numba."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return the compile cache's folder: in NUMBA_CACHE_DIR, or in the user's cache folder."""
    numba, user = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(numba or user or os.path.expanduser("~/.cache")) / "greenroom" / "compiled"
