"""Let every operation of every scenario fail in turn: `make faults`.

    python -m tests.faults.run                       # all scenarios
    python -m tests.faults.run pack pull --most 40   # some, and at most 40 places of a kind
    python -m tests.faults.run serve --only EIO:17   # one fault

A fault is a kind (tests/faults/shim.py) and the number of the operation that fails. After it the
result must be right, or there must be one clear error; no thread, descriptor or draft may be left,
and the same again without a fault must have the right result. Exit code 1 where that fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from greenroom.errors import GreenroomError
from tests import conftest  # the settings of all tests
from tests.counts import add_all
from tests.faults.scenarios import SCENARIOS, Scenario, prepared, reset
from tests.faults.shim import KINDS, Fault, Kind, armed, numbers, start
from tests.faults.steps import KIND as STEP
from tests.faults.steps import failing_step

SETTLE_S = 5.0
HANG_S = 300.0  # of a fault and the run after it; `tune` takes ten seconds on a quiet machine
LONGEST_LINE = 1500


class Wrong(AssertionError):
    """A promise that a fault broke."""


def thread_names() -> Counter[str]:
    return Counter(each.name for each in conftest.threads())


def open_files(root: Path) -> Counter[str]:
    """Open files below a folder, each with the number of its descriptors."""
    found = Counter[str]()
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except OSError:
            continue
        if target.startswith(str(root)):
            found[target] += 1
    return found


def brief(error: BaseException) -> str:
    """An error with its last places in our code, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/greenroom/" in each.filename][-4:]
    places = ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in [*ours, frames[-1]])
    return f"{type(error).__name__}: {str(error)[:2000]} ({places})"


def attempt(scenario: Scenario, root: Path) -> tuple[Any, BaseException | None]:
    """(what `run` returned, None), or (None, its error)."""
    try:
        return scenario.run(root), None
    except BaseException as error:
        return None, error


def check_error(error: BaseException) -> None:
    """Wrong unless it is one clear error of ours."""
    line = str(error)
    if not isinstance(error, GreenroomError):
        raise Wrong(f"a foreign error: {brief(error)}")
    if not line.strip() or "\n" in line or len(line) > LONGEST_LINE:
        raise Wrong(f"no single clear line: {line[:300]!r}")


def check_left(root: Path, before: Counter[str], open_before: Counter[str]) -> None:
    """Wrong if a thread or a descriptor is left, also after a while."""
    until = time.monotonic() + SETTLE_S
    while True:
        threads, files = thread_names() - before, open_files(root) - open_before
        if not threads and not files:
            return
        if time.monotonic() > until:
            raise Wrong(f"left: threads {dict(threads)}, files {list(files)[:3]}")
        gc.unfreeze()  # commands freeze what is there once a model is loaded
        gc.collect()
        time.sleep(0.02)


@contextmanager
def fail(kind: Kind, number: int, root: Path) -> Iterator[Fault]:
    """Let one operation or step fail. Wrong bytes are only in files that have checksums."""
    if kind is STEP:
        with failing_step(number) as fault:
            yield fault
    else:
        with armed(kind, number, root / "work" if kind.effect == "wrong" else root) as fault:
            yield fault


def names(root: Path) -> set[str]:
    """All names below root/work, but for empty files that huggingface_hub could not remove.

    It makes them to learn the permissions of new files.
    """
    return {
        str(path.relative_to(root))
        for path in (root / "work").rglob("*")
        if not (path.name.startswith("tmp_") and path.parent.name == "blobs") or path.stat().st_size
    }


def try_fault(
    scenario: Scenario, root: Path, kind: Kind, number: int, expected: Any, listed: set[str]
) -> tuple[Fault, bool]:
    """Let one operation fail; (what failed, whether the result was right). Wrong otherwise."""
    reset(root)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    before, open_before = thread_names(), open_files(root)
    with fail(kind, number, root) as fault:
        value, error = attempt(scenario, root)
    if error is None:
        result = scenario.result(root, value)
        if result != expected:
            raise Wrong(f"a wrong result: {str(result)[:400]} instead of {str(expected)[:400]}")
    elif kind.is_harmless:
        raise Wrong(f"the system may do this: {brief(error)}")
    else:
        check_error(error)
    failed = error is not None
    del error
    check_left(root, before, open_before)
    value, error = attempt(scenario, root)
    if error is not None:
        raise Wrong(f"the next run fails: {brief(error)}")
    if (result := scenario.result(root, value)) != expected:
        raise Wrong(f"the next run is wrong: {str(result)[:400]}")
    if left := names(root) - listed:
        raise Wrong(f"files are left: {sorted(left)}")
    return fault, not failed


def run(name: str, kinds: list[Kind], most: int, only: int | None, counts: Counter[Any]) -> int:
    """Try all faults of a scenario; the number of broken promises."""
    broken = 0
    with TemporaryDirectory(prefix="faults-") as folder, prepared(name, Path(folder)) as scenario:
        root = Path(folder)
        expected = scenario.result(root, scenario.run(root))  # imports, compiles
        reset(root)
        with armed(KINDS["EIO"], 0, root) as total, failing_step(0) as steps:
            value = scenario.run(root)
        assert scenario.result(root, value) == expected
        reset(root)
        with armed(KINDS["wrong"], 0, root / "work") as checked:
            scenario.run(root)
        scenario.run(root)
        listed = names(root)
        for kind in kinds:
            if kind.name in scenario.spared:
                continue
            of = checked if kind.effect == "wrong" else total
            count = sum(steps.counts.values()) if kind is STEP else of.count(kind)
            chosen = [only] if only else numbers(count, most)
            for number in chosen:
                try:
                    fault, right = try_fault(scenario, root, kind, number, expected, listed)
                except Wrong as error:
                    broken += 1
                    print(f"{name} {kind.name}:{number}: {error}", flush=True)
                    continue
                if fault.operation is not None:
                    counts[name, kind.name, fault.operation, right] += 1
    return broken


def by_operation(scenario: str, counts: Counter[Any]) -> dict[str, int]:
    """A scenario's counts by operation, as tests.counts adds them up."""
    summed = Counter[str]()
    for (name, _, operation, right), number in counts.items():
        if name == scenario:
            summed[f"operations/{operation} {'right' if right else 'refused'}"] += number
    return dict(summed)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "step"], choices=[*KINDS, "step"])
    parser.add_argument("--only", help="KIND:NUMBER")
    parser.add_argument("--most", type=int, default=1 << 30, help="places of a kind in a scenario")
    args = parser.parse_args(argv)
    if "shim" not in os.environ.get("LD_PRELOAD", ""):
        return start("tests.faults.run", *argv).returncode
    only = None
    if args.only:
        args.kinds, only = [args.only.split(":")[0]], int(args.only.split(":")[1])
    known = KINDS | {STEP.name: STEP}
    broken, counts = 0, Counter[Any]()
    for name in args.scenarios:
        begin = time.monotonic()
        broken += run(name, [known[each] for each in args.kinds], args.most, only, counts)
        right = sum(n for key, n in counts.items() if key[0] == name and key[3])
        refused = sum(n for key, n in counts.items() if key[0] == name and not key[3])
        add_all({f"faults/{name} right": right, f"faults/{name} refused": refused})
        add_all(by_operation(name, counts))
        took = time.monotonic() - begin
        print(f"{name}: {right} faults without effect, {refused} refused in one line, {took:.0f} s",
              flush=True)  # fmt: skip
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
