"""Results outlive what writes them: cells are resumed, deadlines held, crashes cost one cell."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu_report.conftest import FOLDER

# Stands for worker.py: writes a cell, dies in one, fails in one, and sleeps past the deadline.
WORKER = """
import os, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from ledger import BEGUN, DONE, FAILED, Ledger
ledger, run = Ledger(Path({out!r})), {run!r}
for cell in ledger.open_cells("kernels", {cells!r}, run):
    if time.time() > {until}:
        sys.exit(0)
    ledger.write("kernels", cell, BEGUN, run)
    print("at", cell, flush=True)
    if cell == "dies" and not {healthy}:
        os.kill(os.getpid(), 11)
    if cell == "sleeps" and not {healthy}:
        time.sleep(60)
    ledger.write("kernels", cell, DONE, run, values={{"of": cell}})
"""
CELLS = ["first", "dies", "second", "sleeps", "last"]


@pytest.fixture
def part(report: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that measures the part "kernels" with the stand-in and returns the states."""
    main, ledger = load_main(report), report("ledger")
    monkeypatch.setattr(main, "CLOSING_S", 0.4)
    monkeypatch.setattr(main, "LEAST_S", 0.1)
    monkeypatch.setattr(main.shapes, "cells", lambda part, smoke: CELLS)
    book = ledger.Ledger(tmp_path)

    def measure(run: str, seconds: float, healthy: bool) -> dict[str, Any]:
        options = main.Options(tmp_path, tmp_path, time.time() + seconds, run, True)

        def command(part: str, given: Any) -> list[str]:
            return [sys.executable, "-c", WORKER.format(
                folder=str(FOLDER), out=str(tmp_path), run=run, cells=CELLS,
                until=given.until, healthy=healthy,
            )]  # fmt: skip

        monkeypatch.setattr(main, "worker_command", command)
        main.measure("kernels", options, book)
        return {cell: book.rows()["kernels", cell] for cell in CELLS}

    return measure


def load_main(report: Callable[[str], Any]) -> Any:
    """__main__.py under a name of its own: pytest's is taken."""
    from importlib.util import module_from_spec, spec_from_file_location

    report("shapes")
    spec = spec_from_file_location("gpu_report_main", FOLDER / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_report_main"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.process
def test_a_part_ends_in_time_and_the_next_run_goes_on(part) -> None:
    begin = time.monotonic()
    rows = part("1", seconds=3.0, healthy=False)
    assert time.monotonic() - begin < 15
    states = {cell: row["status"] for cell, row in rows.items()}
    assert states == {
        "first": "done", "dies": "failed", "second": "done", "sleeps": "not measured",
        "last": "not measured",
    }  # fmt: skip
    assert rows["dies"]["reason"] == "signal SIGSEGV: at dies"
    assert rows["sleeps"]["reason"] == rows["last"]["reason"] == "the time was up"
    again = part("2", seconds=20.0, healthy=True)
    assert {row["status"] for row in again.values()} == {"done"}
    assert {cell: row["run"] for cell, row in again.items()} == {
        "first": "1", "dies": "2", "second": "1", "sleeps": "2", "last": "2"
    }  # fmt: skip


def test_without_time_nothing_is_started(part, tmp_path) -> None:
    rows = part("1", seconds=0.0, healthy=True)
    assert {row["status"] for row in rows.values()} == {"not measured"}
    assert not (tmp_path / "log.txt").exists()


def test_a_line_that_was_cut_off_is_passed_over(report, tmp_path) -> None:
    ledger = report("ledger")
    book = ledger.Ledger(tmp_path)
    book.write("demo", "one", ledger.DONE, "1", values={"seconds": 2})
    with book.path.open("a") as file:
        file.write('{"part": "demo", "cell": "two", "sta')
    assert book.values("demo", "one") == {"seconds": 2}
    assert book.open_cells("demo", ["one", "two"], "2") == ["two"]


def test_a_cell_that_cannot_be_measured_here_is_not_tried_again(report, tmp_path) -> None:
    ledger, worker = report("ledger"), report("worker")
    book = ledger.Ledger(tmp_path)
    args = SimpleNamespace(part="kernels", run="1")

    class Part:
        def measure(self, cell: str) -> dict[str, Any]:
            if cell == "absent":
                raise ledger.NotHere("no such tool")
            raise ZeroDivisionError("a\nb")

    assert worker.measured(book, args, Part(), "absent")
    assert not worker.measured(book, args, Part(), "wrong")
    rows = book.rows()
    assert rows["kernels", "absent"]["reason"] == "no such tool"
    assert rows["kernels", "wrong"]["reason"] == "ZeroDivisionError: a b"
    assert book.open_cells("kernels", ["absent", "wrong"], "2") == ["wrong"]


def test_a_machine_without_a_gpu_is_said_in_one_line(report, tmp_path, monkeypatch) -> None:
    main = load_main(report)
    script = f"print('no CUDA device answers'); raise SystemExit({main.NOTHING_HERE})"
    monkeypatch.setattr(main, "worker_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="gpu_report: no CUDA device answers"):
        main.main(["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")])


def test_the_workers_keep_the_caller_s_path_and_are_offline(report, monkeypatch) -> None:
    main = load_main(report)
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    given = main.environment(smoke=False)
    assert given["PYTHONPATH"].split(os.pathsep)[-1] == "/wheels"
    assert given["HF_HUB_OFFLINE"] == "1"
