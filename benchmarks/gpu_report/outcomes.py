"""A pytest plugin: appends every test's outcome to the file that OUTCOMES names, as it ends."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Write a test's outcome: of its call, or of its setup where that failed or skipped."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that collects the reports says it too
        return
    if report.when != "call" and report.outcome == "passed":
        return
    reason = "" if report.outcome == "passed" else str(report.longrepr).strip()
    row = {
        "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2),
        "reason": reason[-1500:],
    }  # fmt: skip
    with open(os.environ["OUTCOMES"], "a") as file:
        file.write(json.dumps(row) + "\n")
