"""Check that the scheduler finds each seeded defect of tests/mutants/schedules.

    python -m tests.schedules.mutants             # all
    python -m tests.schedules.mutants fair-lock   # some of them

Each defect is applied to a copy of the package, and `MOST` schedules are run in the copy, from seed
0 on, until the first one fails. Without a defect the same schedules must not fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.patches import ROOT, make_copy, patches

MOST = 300
# The scenario in which each defect shows.
SCENARIO_OF = {
    "drain-order": "predictions",
    "early-delivery": "steps",
    "engine-stop": "engine",
    "engine-submit": "engine",
    "fair-lock": "steps",
    "host-done": "host-jobs",
    "pressure-lock": "pressure",
    "prompt-memory": "prompts",
    "resize-notify": "steps",
    "signal-wait": "steps",
}


def first_failure(name: str, source: Path) -> tuple[int, str] | None:
    """Return the first seed whose schedule fails, and the kind of failure; None without one."""
    code = (
        f"import sys; sys.path[:0] = [{str(source)!r}, {str(ROOT)!r}]\n"
        "from tests.schedules.mutants import search\n"
        f"search({SCENARIO_OF[name]!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = re.search(r"^found (\d+) (\w+)$", done.stdout, re.MULTILINE)
    return None if found is None else (int(found[1]), found[2])


def search(scenario: str) -> None:
    """Print the first of `MOST` seeds whose schedule fails."""
    from tests.schedules.scenarios import SCENARIOS, ready
    from tests.schedules.scheduler import Failure

    with ready([]):  # with the defect, the run that warms up may fail too
        for seed in range(MOST):
            try:
                SCENARIOS[scenario].run(seed)
            except Failure as failure:
                print(f"found {seed} {type(failure).__name__}")
                return


def main(names: list[str]) -> int:
    missed = 0
    for name in names or patches("schedules"):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            found = first_failure(name, make_copy(Path(folder), patches("schedules")[name]))
        missed += found is None
        text = "missed" if found is None else f"found by schedule {found[0] + 1}: {found[1]}"
        print(f"{name} ({SCENARIO_OF[name]}): {text}, {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
