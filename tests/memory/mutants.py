"""Check that tests.memory.run finds each seeded defect of tests/mutants/memory.

    python -m tests.memory.mutants                  # all
    python -m tests.memory.mutants kept-answer      # one

Each defect is applied to a copy of the package, whose server answers REQUESTS requests to a
miniature of one model. They must fail with the defect's message.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.patches import ROOT, make_copy, patches, report_missed

MODEL, REQUESTS = ("qwen3-30b-a3b", "--forms", "gguf"), "240"
# What each defect breaks: memory of answers that is never freed; buffers that no budget counts.
SHOWN_BY = {
    "kept-answer": "the memory of the process grew by",
    "uncounted-activations": "MiB of --memory",
}


def is_found(name: str) -> bool:
    """Serve with the defect; True if its promise is broken."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        source = make_copy(Path(folder), patches("memory")[name])
        command = [sys.executable, "-m", "tests.memory.run", *MODEL, "--requests", REQUESTS]
        done = subprocess.run(
            [*command, "--seed", "0"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(f"{name}: " + (done.stdout.strip() or done.stderr[-2000:]), flush=True)
        return done.returncode == 1 and SHOWN_BY[name] in done.stdout


if __name__ == "__main__":
    sys.exit(report_missed(sys.argv[1:] or SHOWN_BY, is_found))
