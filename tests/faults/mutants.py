"""Check that `make faults` finds each seeded defect of tests/mutants/faults.

    python -m tests.faults.mutants                  # all
    python -m tests.faults.mutants open-store       # one

Each defect is applied to a copy of the package. The scenario in which it shows is run there with as
many places as in `make ci`; it must fail there, and it passes without the defect.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.patches import ROOT, make_copy, patches, report_missed

MOST = "3"  # FAULTS in the Makefile
# The scenario and the kind of fault in which each defect shows: in store, driver and server.
SHOWN_BY = {
    "open-store": ("run", "short"),
    "refused-thread": ("run", "thread"),
    "prompt-checksum": ("serve-prompts", "wrong"),
}


def is_found(name: str) -> bool:
    """Run a scenario with the defect; True if a promise is broken."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        source = make_copy(Path(folder), patches("faults")[name])
        scenario, kind = SHOWN_BY[name]
        command = [sys.executable, "-m", "tests.faults.run", scenario, "--kinds", kind]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run(
            [*command, "--most", MOST], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        print(f"{name}: " + (done.stdout.strip() or done.stderr[-2000:]), flush=True)
        return done.returncode == 1 and f"{scenario} {kind}:" in done.stdout


if __name__ == "__main__":
    sys.exit(report_missed(sys.argv[1:] or SHOWN_BY, is_found))
