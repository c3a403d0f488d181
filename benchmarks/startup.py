"""How long one waits: `greenroom --help`, and the first token of the demo model.

    python benchmarks/startup.py

`--help`: wall time, median of --repeats, files in the page cache. First token: from starting the
process to the first text of `greenroom run demo` on its standard output. Cold: Numba's cache is
an empty folder, so every kernel is compiled. Warm: the same folder again. Python's own byte code
and the page cache are warm in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

from common import commit, greenroom_program, machine, table


def help_s() -> float:
    start = time.perf_counter()
    subprocess.run([*greenroom_program(), "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_token_s(numba_cache: str) -> tuple[float, float]:
    """Seconds to the first text, and to the end of eight tokens."""
    flags = ["--max-new-tokens", "8", "--temperature", "0"]
    command = [*greenroom_program(), "run", "demo", "Once upon a time", *flags]
    env = {**os.environ, "NUMBA_CACHE_DIR": numba_cache}
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.read(1):
            raise SystemExit(process.stderr.read().decode().strip() or "no text")
        first = time.perf_counter() - start
        process.communicate()
    return first, time.perf_counter() - start


def medians(once: Callable[[], tuple[float, ...]], repeats: int) -> list[float]:
    return [statistics.median(column) for column in zip(*(once() for _ in range(repeats)),
                                                        strict=True)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="time start-up and the demo's first token")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}\n")

    def cold() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as empty:
            return first_token_s(empty)

    help_s()  # reads the files once
    (help_time,) = medians(lambda: (help_s(),), args.repeats)
    cold_first, cold_all = medians(cold, max(args.repeats // 2, 1))
    with tempfile.TemporaryDirectory() as cache:
        first_token_s(cache)
        warm_first, warm_all = medians(lambda: first_token_s(cache), args.repeats)
    print(
        table(
            ("start-up", "first text, s", "end, s"),
            [
                ("`greenroom --help`", "-", f"{help_time:.2f}"),
                ("`greenroom run demo`, cold kernels", f"{cold_first:.2f}", f"{cold_all:.2f}"),
                ("`greenroom run demo`, warm kernels", f"{warm_first:.2f}", f"{warm_all:.2f}"),
            ],
        )
    )


if __name__ == "__main__":
    main()
