"""The tests of tests/gpu: in parallel, then sequentially those that fill the GPU's memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ledger import CutShort, Ledger

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300  # of a test: most of it is Triton's compiler
CELLS = {
    "parallel": ["-n", "auto", "--dist", "worksteal", "-m", "not fills_memory"],
    "fills memory": ["-m", "fills_memory"],
}
REHEARSAL = {
    "parallel": ["-n", "2", "--dist", "worksteal", "-k", "not is_a_greenroom_error"],
    "fills memory": ["-k", "is_a_greenroom_error"],
}
SLOWEST = 10  # tests that are named


class Cells:
    """The part "tests"."""

    def __init__(self, args: argparse.Namespace, ledger: Ledger) -> None:
        self._args = args

    def measure(self, cell: str) -> dict[str, Any]:
        """Outcomes of the tests, and why some failed. RuntimeError where none was run."""
        smoke = self._args.smoke
        target = ["tests/test_errors.py"] if smoke else ["tests/gpu", "--timeout", str(TIMEOUT_S)]
        options = (REHEARSAL if smoke else CELLS)[cell]
        with tempfile.TemporaryDirectory(dir=self._args.scratch) as folder:
            outcomes = Path(folder) / "outcomes"
            path = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
            environment = {"OUTCOMES": str(outcomes), "PYTHONPATH": os.pathsep.join(path)}
            if not smoke:
                environment["GREENROOM_TEST_GPU"] = "1"
            command = [sys.executable, "-m", "pytest", *target, *options, "-p", "outcomes"]
            left, begin = max(1.0, self._args.until - time.time()), time.perf_counter()
            try:
                done = subprocess.run(
                    command, env={**os.environ, **environment}, cwd=ROOT, timeout=left, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                )  # fmt: skip
                code, output = done.returncode, done.stdout
            except subprocess.TimeoutExpired as cut:
                cut_output: Any = cut.stdout or b""
                code, output = (
                    None,
                    cut_output
                    if isinstance(cut_output, str)
                    else cut_output.decode(errors="replace"),
                )
            print(output, flush=True)
            lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        if not lines:
            raise RuntimeError((output.strip().splitlines() or ["pytest printed nothing"])[-1])
        test_counts = summed(
            [json.loads(line) for line in lines], code, time.perf_counter() - begin
        )
        if code is None:
            raise CutShort(test_counts)
        return test_counts


def summed(rows: list[dict[str, Any]], code: int | None, seconds: float) -> dict[str, Any]:
    """The counts of a run; `code` is pytest's exit code, None where the time was up."""
    counts = Counter(row["outcome"] for row in rows)
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:SLOWEST]
    return {
        "passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"],
        "exit_code": code, "complete": code is not None, "seconds": seconds,
        "failures": [row for row in rows if row["outcome"] == "failed"],
        "slowest": [[row["test"], row["seconds"]] for row in slowest],
    }  # fmt: skip
