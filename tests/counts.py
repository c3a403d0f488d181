"""Counts that add up over runs of long tests: inputs that were fuzzed, cases that were compared.

    add("fuzz/gguf inputs", 12_000)
    totals()                          # {"fuzz/gguf inputs": 250_000}

`python -m tests.counts [SUITE ...]` prints a table of each suite, the text before the slash.

The file is build/soak/counts.json; GREENROOM_SOAK_COUNTS names another one. Processes may add at
the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
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


def tables(suites: list[str]) -> Iterator[str]:
    """Yield the lines of Markdown tables: a row for each name of a suite, a column for each kind.

    All suites that have counts if `suites` is empty.
    """
    counts = totals()
    for suite in suites or sorted({name.partition("/")[0] for name in counts}):
        own = {name: n for name, n in counts.items() if name.startswith(f"{suite}/")}
        cells = {name[len(suite) + 1 :].rpartition(" ")[::2]: n for name, n in own.items()}
        kinds = sorted({kind for _, kind in cells})
        rows = {name: [cells.get((name, kind), 0) for kind in kinds] for name, _ in sorted(cells)}
        rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        yield from (f"| {suite} | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}")
        yield from (
            f"| {name} | {' | '.join(f'{n:,}' for n in row)} |" for name, row in rows.items()
        )
        yield ""


if __name__ == "__main__":
    print("\n".join(tables(sys.argv[1:])))
