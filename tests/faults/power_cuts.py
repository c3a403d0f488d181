"""Cut the power at every moment of every scenario that writes: `make faults`.

    python -m tests.faults.power_cuts                    # all
    python -m tests.faults.power_cuts pack --most 40     # one, and at most 40 disks

Changes of files are recorded. Every disk that a power cut could have left (tests/faults/disk.py)
is given to the same scenario, whose next run must have the right result.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests import conftest  # noqa: F401  the settings of all tests
from tests.counts import add
from tests.faults.disk import Disk, read_log, states
from tests.faults.scenarios import prepared, reset
from tests.faults.shim import logged, start

WRITING = ("run-learned", "pack", "trace-record", "batch", "pull", "serve-prompts")


def run(name: str, most: int, seed: int) -> tuple[int, int]:
    """Cut the power of a scenario; (disks, disks whose next run was wrong)."""
    random, wrong, tried = Random(seed), 0, 0
    with TemporaryDirectory(prefix="power-") as folder, prepared(name, Path(folder)) as scenario:
        root, log = Path(folder), Path(folder).parent / f"{Path(folder).name}.log"
        expected = scenario.result(root, scenario.run(root))  # imports, compiles
        reset(root)
        try:
            with logged(root / "work", log):
                scenario.run(root)
            changes = read_log(log)
        finally:
            log.unlink(missing_ok=True)
        begin = Disk.of(root / "work-begin", str(root / "work"))
        found = list(states(changes, begin, random))
        for disk in random.sample(found, min(most, len(found))):
            tried += 1
            disk.write(root / "work")
            try:
                result = scenario.result(root, scenario.run(root))
                problem = "" if result == expected else f"a wrong result: {str(result)[:400]}"
            except BaseException:
                problem = traceback.format_exc()
            if problem:
                wrong += 1
                disk.write(root / "work")
                print(f"{name}: {problem}\nthe files were {sizes(root / 'work')}", flush=True)
    add(f"power cuts/{name} disks", tried)
    print(f"{name}: {len(changes)} changes, {len(found)} disks, {tried} tried, {wrong} wrong")
    return tried, wrong


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", default=list(WRITING))
    parser.add_argument("--most", type=int, default=1 << 30, help="disks of a scenario")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if "shim" not in os.environ.get("LD_PRELOAD", ""):
        return start("tests.faults.power_cuts", *argv).returncode
    begin = time.monotonic()
    found = [run(name, args.most, args.seed) for name in args.scenarios]
    print(f"{sum(tried for tried, _ in found)} disks, {time.monotonic() - begin:.0f} s")
    return 1 if any(wrong for _, wrong in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
