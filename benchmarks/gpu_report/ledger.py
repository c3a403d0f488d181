"""The results file: one JSON line a cell, appended as cells begin and end.

The last line of a cell counts. So a run that is stopped anywhere resumes there, and another run can
read the results so far.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BEGUN = "begun"
DONE = "done"
FAILED = "failed"  # `reason` says how
LEFT_OUT = "left out"  # cannot be measured on this machine; `reason` says why
NOT_MEASURED = "not measured"  # the time was up
FINAL = (DONE, LEFT_OUT)  # never measured again
MACHINE = "machine"  # a part of its own

Row = dict[str, Any]


class NotHere(Exception):
    """A measurement that this machine cannot make; the message has the reason."""


class CutShort(Exception):
    """A measurement that the deadline ended; `values` are the results so far."""

    def __init__(self, values: Row) -> None:
        super().__init__("the time was up")
        self.values = values


class Ledger:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"

    def write(self, part: str, cell: str, status: str, run: str, **fields: Any) -> None:
        """Append a cell's state; `run` names the run that brought it."""
        row = {"part": part, "cell": cell, "status": status, "run": run, "time": time.time()}
        with self.path.open("a") as file:
            file.write(json.dumps({**row, **fields}) + "\n")

    def _lines(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # cut off as the machine went
                continue

    def rows(self) -> dict[tuple[str, str], Row]:
        """The last line of each cell, in the order of the cells' first lines."""
        return {(row["part"], row["cell"]): row for row in self._lines()}

    def values(self, part: str, cell: str) -> dict[str, Any]:
        """The results of a cell; empty unless it is done."""
        row = self.rows().get((part, cell), {})
        return row.get("values", {}) if row.get("status") == DONE else {}

    def open_cells(self, part: str, cells: Iterable[str], run: str) -> list[str]:
        """Cells that this run has still to measure: neither complete nor tried in it."""
        rows = self.rows()
        unfinished = []
        for cell in cells:
            row = rows.get((part, cell), {})
            tried = row.get("run") == run and row.get("status") != BEGUN
            if row.get("status") not in FINAL and not tried:
                unfinished.append(cell)
        return unfinished

    def begun(self, part: str, run: str) -> list[str]:
        """Cells that this run began and did not end."""
        return [
            cell
            for (of, cell), row in self.rows().items()
            if of == part and row["status"] == BEGUN and row["run"] == run
        ]
