"""Counts of long tests add up, whoever adds to them at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import add, add_all, tables, totals

SCRIPT = "from tests.counts import add\nfor _ in range(50): add('a', 1)"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "counts.json"
    monkeypatch.setenv("GREENROOM_SOAK_COUNTS", str(path))
    return path


def test_counts_add_up(file: Path) -> None:
    assert totals() == {}
    add("fuzz/gguf inputs", 5)
    add_all({"fuzz/gguf inputs": 2, "fuzz/npz inputs": 1})
    assert totals() == {"fuzz/gguf inputs": 7, "fuzz/npz inputs": 1} == json.loads(file.read_text())


def test_processes_add_at_the_same_time(file: Path) -> None:
    root = Path(__file__).parents[1]
    running = [subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=root) for _ in range(3)]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    assert totals() == {"a": 150}


def test_tables_have_a_row_for_each_name(file: Path) -> None:
    add_all({"kills/trace record kills": 3, "kills/run kills": 1200, "faults/run right": 5})
    add_all({"faults/run refused": 2, "faults/pack right": 1, "server/faults": 7})
    assert [*tables(["kills"])] == [
        "| kills | kills |", "|---|--:|", "| run | 1,200 |", "| trace record | 3 |",
        "| all | 1,203 |", "",
    ]  # fmt: skip
    assert "\n".join(tables([])).splitlines() == [
        "| faults | refused | right |", "|---|--:|--:|", "| pack | 0 | 1 |", "| run | 2 | 5 |",
        "| all | 2 | 6 |", "",
        *tables(["kills"]),
        "| server | faults |", "|---|--:|", "|  | 7 |", "| all | 7 |",
    ]  # fmt: skip
