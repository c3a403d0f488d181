"""Each option of the scheduler can be deleted: `make without-options`.

For each option, and for all of them, the project is copied without the option's files, tests and
lines in the table. Linting, types, import rules and tests must pass in the copy; tests that need
the option skip themselves (tests/options.py). A copy without one option runs the tests of CORE, the
copy without any those of TESTS ("tests/core tests/cli"), or of all folders.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = Path("src/greenroom/core/options")
KERNELS = Path("src/greenroom/runtime/kernels/native/lib")  # built, so not tracked
# As `make test` has them.
LEFT_OUT = ("slow", "bench_smoke", "process", "interpreted", "portable", "browser", "ray",
            "offline_gpu")  # fmt: skip
CORE = ("tests/config", "tests/core/options")
MARKED = ("-m", " and ".join(f"not {marker}" for marker in LEFT_OUT))
TABLE = Path("src/greenroom/core/config/scheduler.py")


def names() -> list[str]:
    return sorted(each.stem for each in (ROOT / OPTIONS).glob("[!_]*.py"))


def copy_without(left_out: Sequence[str], folder: Path) -> None:
    """Copy the tracked and the new files of the project, without some options."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for each in filter(None, files.split("\0")):
        if (ROOT / each).is_file():
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / each, folder / each)
    shutil.copytree(ROOT / KERNELS, folder / KERNELS)
    table = (folder / TABLE).read_text()
    for name in left_out:
        (folder / OPTIONS / f"{name}.py").unlink()
        (folder / OPTIONS / f"rules/{name}.py").unlink()
        (folder / f"tests/core/options/test_{name}.py").unlink(missing_ok=True)
        imported = re.search(rf"^from greenroom\.core\.options\.{name} import (\w+)\n", table, re.M)
        assert imported is not None
        table = table.replace(imported[0], "").replace(f"    {imported[1]},\n", "")
        assert imported[1] not in table
    (folder / TABLE).write_text(table)


def check(folder: Path, tests: Sequence[str]) -> int:
    """Run the checks in a copy; the exit code of the first that fails, or 0."""
    python = sys.executable
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    if (ROOT / ".mypy_cache").is_dir():  # unchanged files are not checked again
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    for command in (
        [python, "-m", "ruff", "check", "."],
        [python, "-m", "mypy"],
        [str(Path(python).with_name("lint-imports"))],
        [python, "-m", "pytest", "-q", *MARKED, "-n", "2", "--dist", "worksteal", *tests],
    ):
        begin = time.monotonic()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        print(f"  {Path(command[0]).name} {' '.join(command[1:4])}: exit {done.returncode},"
              f" {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
        if done.returncode:
            print((done.stdout + done.stderr)[-8000:])
            return done.returncode
    return 0


def main() -> int:
    everything = os.environ.get("TESTS", "tests").split()
    found = names()
    for left_out in (*((name,) for name in found), found):
        print(f"without {', '.join(left_out)}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            copy_without(left_out, Path(folder))
            if code := check(Path(folder), CORE if len(left_out) == 1 else everything):
                return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
