"""Check that the fuzzer of each format finds its seeded defect, and nothing without the defect.

    python -m tests.mutants              # all formats
    python -m tests.mutants gguf npz     # some of them
    python -m tests.mutants --blind      # without coverage guidance, for comparison

Each fuzzer gets the time that it has in `make ci`, and starts from the valid files alone.
GREENROOM_FUZZ_SEED=N tries other inputs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz import coverage
from tests.mutants.patches import make_copy, patches

CI_SECONDS = 60.0  # of `make fuzz` in `make ci`, all formats together
# Imported once, so that each fuzzer starts at once. None of them starts threads.
LIBRARIES = ("torch", "transformers", "numba", "pydantic", "fastapi", "uvicorn", "httpx2",
             "transformers.cli.serving.utils", "transformers.modeling_utils")  # fmt: skip


def main() -> int:
    """Print what each fuzzer finds; 1 if a defect is missed, or found where there is none."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in LIBRARIES:
        __import__(library)
    names = [name for name in sys.argv[1:] if name != "--blind"] or [*patches("fuzz")]
    wrong = []
    for name in names:
        with_defect, without = (attempt(name, patch) for patch in (patches("fuzz")[name], None))
        good = with_defect["failed"] and not without["failed"]
        wrong += [] if good else [name]
        print(f"{name}: {'found' if with_defect['failed'] else 'MISSED'} after"
              f" {with_defect['inputs']:,} inputs, {with_defect['seconds']:.2f} s of"
              f" {with_defect['budget']:.2f};"
              f" without it {without['failed']} failures in {without['inputs']:,}",
              flush=True)  # fmt: skip
    print(f"{len(names) - len(wrong)} of {len(names)} defects found")
    return 1 if wrong else 0


def attempt(name: str, patch: Path | None) -> dict[str, Any]:
    """Fuzz a format in a process of its own, until the first failure or the end of its time."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        source, result = make_copy(Path(folder), patch), Path(folder) / "result"
        child = os.fork()
        if not child:
            code = 1
            try:
                _fuzz(name, source, result)
                code = 0
            except BaseException:
                logging.getLogger().exception("the fuzzer of %s failed", name)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if not result.exists():  # a signal has ended it, or its valid file was not read
            failed = int(os.WIFSIGNALED(status))
            return {"failed": failed, "inputs": 0, "seconds": 0.0, "budget": 0.0}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _fuzz(name: str, source: Path, result: Path) -> None:
    sys.path.insert(0, str(source))
    coverage.install()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from tests.fuzz.fuzzer import Fuzzer, share

    os.fsync = lambda descriptor: None
    logging.disable()
    first = int(os.environ.get("GREENROOM_FUZZ_SEED") or 0)
    guided = "--blind" not in sys.argv
    fuzzer = Fuzzer(name, first, failures=result.parent / "failures", guided=guided)
    began = time.process_time()
    budget = CI_SECONDS * share(name)
    fuzzer.run(budget, stop=True)
    took = time.process_time() - began
    found = {
        "failed": fuzzer.failed, "inputs": fuzzer.number, "seconds": took, "budget": budget
    }  # fmt: skip
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
