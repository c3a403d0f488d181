"""Counts that add up over runs of long tests: inputs that were fuzzed, cases that were compared.

    add("fuzz/gguf inputs", 12_000)
    totals()                          # {"fuzz/gguf inputs": 250_000}

The file is build/soak/counts.json; GREENROOM_SOAK_COUNTS names another one. Processes may add at
the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / "build" / "soak" / "counts.json"


def add(name: str, count: int) -> None:
    """Add to one of the counts."""
    add_all({name: count})


def add_all(counts: dict[str, int]) -> None:
    """Add to several counts at once."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        summed = totals()
        for name, count in counts.items():
            summed[name] = summed.get(name, 0) + count
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(summed, indent=1, sort_keys=True) + "\n")
        os.replace(part, path)  # a reader sees all of the old counts, or all of the new ones


def totals() -> dict[str, int]:
    """Return the counts by name."""
    try:
        counts: dict[str, int] = json.loads(_path().read_text())
    except FileNotFoundError:
        return {}
    return counts


def _path() -> Path:
    return Path(os.environ.get("GREENROOM_SOAK_COUNTS") or DEFAULT)
