"""Counts of long tests add up, whoever adds to them at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import add, add_all, totals

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
