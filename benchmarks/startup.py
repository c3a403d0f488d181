"""Start-up time: `greenroom --help`, and the first token of the demo model.

    python benchmarks/startup.py [--parts help cold warm] [--own-cache]

`--help`: wall time, median of --repeats, files in the page cache. First token: from starting the
process to the first text of `greenroom run demo` on its standard output. Cold: Numba's cache is
an empty folder, so the policy's functions are compiled. Warm: the same folder again, or with
--own-cache the one that this installation uses. Python's own byte code and the page cache are warm
in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

from common import commit, greenroom_program, machine, table

PARTS = ("help", "cold", "warm")


def help_s() -> float:
    start = time.perf_counter()
    subprocess.run([*greenroom_program(), "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_token_s(numba_cache: str | None) -> tuple[float, float]:
    """Seconds to the first text, and to the end of eight tokens."""
    flags = ["--max-new-tokens", "8", "--temperature", "0"]
    command = [*greenroom_program(), "run", "demo", "Once upon a time", *flags]
    env = dict(os.environ)
    if numba_cache is not None:
        env["NUMBA_CACHE_DIR"] = numba_cache
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.read(1):
            raise SystemExit(
                process.stderr.read().decode().strip() or "greenroom run demo printed no text"
            )
        first = time.perf_counter() - start
        process.communicate()
    return first, time.perf_counter() - start


def medians(once: Callable[[], tuple[float, ...]], repeats: int) -> list[float]:
    return [statistics.median(column) for column in zip(*(once() for _ in range(repeats)),
                                                        strict=True)]  # fmt: skip


def cold() -> tuple[float, float]:
    """Seconds to the first text and to the end, with every policy function to compile."""
    with tempfile.TemporaryDirectory() as empty:
        return first_token_s(empty)


def warm(repeats: int, own_cache: bool) -> list[float]:
    """Median seconds to the first text and to the end, with compiled functions in the cache."""
    with nullcontext() if own_cache else tempfile.TemporaryDirectory() as folder:
        first_token_s(folder)
        return medians(lambda: first_token_s(folder), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="time start-up and the demo's first token")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--own-cache", action="store_true", help="warm: with the functions that"
                        " this installation has compiled")  # fmt: skip
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}\n")
    rows = []
    if "help" in args.parts:
        help_s()  # reads the files once
        rows.append(("`greenroom --help`", "-", *medians(lambda: (help_s(),), args.repeats)))
    if "cold" in args.parts:
        times = medians(cold, max(args.repeats // 2, 1))
        rows.append(("`greenroom run demo`, nothing compiled", *times))
    if "warm" in args.parts:
        times = warm(args.repeats, args.own_cache)
        rows.append(("`greenroom run demo`, compiled before", *times))
    shown = [[x if isinstance(x, str) else f"{x:.2f}" for x in row] for row in rows]
    print(table(("start-up", "first text, s", "end, s"), shown))


if __name__ == "__main__":
    main()
