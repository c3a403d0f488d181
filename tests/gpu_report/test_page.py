"""The page of a report: every part's table, what is missing and why, plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def filled(report, tmp_path: Path) -> Path:
    """A folder with results of all parts, one of them failed."""
    ledger = report("ledger")
    book = ledger.Ledger(tmp_path)

    def done(part: str, cell: str, **values: Any) -> None:
        book.write(part, cell, ledger.DONE, "1", seconds=1.0, values=values)

    done(
        "machine", "here", gpu="NVIDIA of a test", cores=16, memory_bytes=1 << 37, smoke=False,
        commit="abc", python="3.12", packages={"torch": "2.11", "numba": None},
    )  # fmt: skip
    failure = {"test": "tests/gpu/test_x.py::test_y", "reason": "E  assert 1\nAssertionError: far"}
    done("tests", "parallel", passed=80, failed=1, skipped=2, seconds=100.0, complete=True,
         failures=[failure], slowest=[])  # fmt: skip
    cut = {"passed": 1, "failed": 0, "skipped": 0, "seconds": 9.0, "complete": False}
    book.write("tests", "fills memory", ledger.NOT_MEASURED, "1", reason="the time was up",
               values={**cut, "failures": [], "slowest": []})  # fmt: skip
    done("kernels", "memory", copy_gb_s=4000.0, read_gb_s=3900.0)
    row = {"tokens": 1, "us": 50.0, "gb_s": 1000.0, "tflop_s": 1.0, "timed": "graph"}
    done("kernels", "qwen3-30b-a3b:grouped_mm", rows=[{**row, "us": 100.0}])
    done("kernels", "qwen3-30b-a3b:int4", rows=[{**row, "host_ms": 0.26, "distance": 1e-3}])
    book.write("kernels", "qwen3-30b-a3b:fp8", ledger.FAILED, "1", reason="an illegal address")
    done("models", "qwen3-30b-a3b:link", gb_s=50.0, small_gb_s=48.0, kernel_gb_s=45.5)
    grouped = {"token_ms": 5.0, "prefill": {"512": 9000.0}}
    done("models", "qwen3-30b-a3b:transformers", grouped_mm=grouped, eager={"token_ms": 50.0})
    tier = {"ids_ms": 0.1, "launches_ms": 0.2, "stalls_ms": 0.3}
    done("models", "qwen3-30b-a3b:tier 100%", token_ms=6.0, bytes_a_token=0, hits=1.0, **tier)
    done("models", "qwen3-30b-a3b:tier 25%", token_ms=20.0, bytes_a_token=5e8, hits=0.5,
         prefill={"512": 300.0}, **tier)  # fmt: skip
    done("models", "qwen3-30b-a3b:copies 25%", token_ms=60.0, hits=0.25)
    done("demo", "cuda auto", seconds=9.0, text="once upon a time")
    done("demo", "cpu eager", seconds=5.0, text="once upon a hill")
    return tmp_path


def test_every_part_has_its_table_and_what_is_missing_its_reason(report, filled) -> None:
    report("page").write(filled, smoke=False)
    text = (filled / "summary.md").read_text()
    for line in (
        "NVIDIA of a test, 16 cores, 137 GB of host memory; commit abc; Python 3.12, torch 2.11",
        "| parallel | 80 | 1 | 2 | 100 |  |",
        "| fills memory | 1 | 0 | 0 | 9 | cut short |",
        "- tests, fills memory: not measured: the time was up",
        "- `tests/gpu/test_x.py::test_y`: AssertionError: far",
        "| qwen3-30b-a3b | int4 | 1 | 50.0 | 1000 | 25% | 1.0 | 2.00 | 260 | graph | 1.0e-03 |",
        "| tier 25% | 20.00 | 10.00 | 10.00 | 2.00 | 50.0% | 0.10 | 0.20 | 0.30 |",
        "| copies 25% | 60.00 |  |  |  | 25.0% |  |  |  |",
        "| transformers grouped_mm | 9000 |",
        "Of 32 MiB: 48.0; in 16 parts by a kernel that reads it: 45.5.",
        "| cpu eager | 5.0 | differs after 12 characters |",
        "- kernels, qwen3-30b-a3b:fp8: failed: an illegal address",
    ):
        assert line in text
    saved = json.loads((filled / "results.json").read_text())
    assert saved["kernels"]["qwen3-30b-a3b:int4"]["values"]["rows"][0]["us"] == 50.0


def test_an_empty_folder_has_a_page_too(report, tmp_path) -> None:
    report("page").write(tmp_path, smoke=False)
    assert "Nothing is missing" in (tmp_path / "summary.md").read_text()


def test_plots_are_made_where_matplotlib_is(report, filled) -> None:
    pytest.importorskip("matplotlib")
    report("page").write(filled, smoke=False)
    for name in ("kernels.png", "models.png"):
        assert (filled / name).stat().st_size > 5000


def test_the_folder_stays_small_and_flat(report, filled) -> None:
    """At most eight files, none in a folder, so that a small transfer takes all of it."""
    report("page").write(filled, smoke=False)
    written = {path.name for path in filled.iterdir()}
    others = {"log.txt", "trace.json.gz"}
    every = {"results.jsonl", "results.json", "summary.md", "kernels.png", "models.png", *others}
    assert written <= every
    assert len(every) <= 8
