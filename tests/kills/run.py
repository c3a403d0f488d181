"""Kill commands with SIGKILL at random moments: does the next start recover?

    python -m tests.kills.run --kills 60                # of all commands together
    python -m tests.kills.run pack --kills 20 --seed 7

A scenario of tests/faults/scenarios.py runs in a child process, which is killed. Then it runs
again from what is on the disk. Its result must be that of an undisturbed run: nothing done is lost,
no lock is left. Children are forked from a process that has imported everything. Counts add up in
the file of tests/counts.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests import conftest  # noqa: F401  the settings of all tests
from tests.counts import add
from tests.faults.scenarios import Scenario, prepared, reset

# What users call these scenarios; `serve` stores prompts, and so has something to lose.
COMMANDS = {
    "run": "run-learned",
    "serve": "serve-prompts",
    "pack": "pack",
    "pull": "pull",
    "trace record": "trace-record",
    "batch": "batch",
    "tune": "tune",
}
MOST_S = 120.0  # of one run


def fork(task: Callable[[], None]) -> int:
    """Run a task in a child process; exit code 0 if it succeeds. Return its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int:
    """The exit code of a child, or minus the signal that ended it; it is killed after MOST_S."""
    until = time.monotonic() + MOST_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGALRM
        time.sleep(0.005)


def check(scenario: Scenario, root: Path, expected: str) -> None:
    found = repr(scenario.result(root, scenario.run(root)))
    assert found == expected, f"{found[:400]} instead of {expected[:400]}"


def expect(scenario: Scenario, root: Path) -> tuple[str, float]:
    """The result of an undisturbed run, and its seconds."""
    file = root / "expected"

    def task() -> None:
        scenario.run(root)  # fills the caches of compiled code
        reset(root)
        begin = time.monotonic()
        value = scenario.run(root)
        took = time.monotonic() - begin
        file.write_text(f"{took}\n{scenario.result(root, value)!r}")

    assert wait(fork(task)) == 0
    took, _, result = file.read_text().partition("\n")
    return result, float(took)


def run(command: str, kills: int, random: Random) -> tuple[int, int]:
    """Kill a command so many times; (runs that were killed before their end, wrong recoveries)."""
    killed = wrong = 0
    with (
        TemporaryDirectory(prefix="kills-") as folder,
        prepared(COMMANDS[command], Path(folder)) as scenario,
    ):
        root = Path(folder)
        expected, took = expect(scenario, root)
        fresh = True
        for _ in range(kills):
            if fresh or random.random() < 0.5:  # also what a kill has left is killed again
                reset(root)
            child = fork(lambda: check(scenario, root, expected))
            time.sleep(random.random() * took * 1.1)
            os.kill(child, signal.SIGKILL)
            killed += wait(child) == -signal.SIGKILL
            fresh = random.random() < 0.7
            if not fresh:
                continue
            if (code := wait(fork(lambda: check(scenario, root, expected)))) != 0:
                wrong += 1
                print(f"{command}: the next start failed with {code}", flush=True)
    return killed, wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commands", nargs="*", default=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=70, help="of all commands together")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args(argv)
    failed = 0
    for command in args.commands:
        begin = time.monotonic()
        each = -(-args.kills // len(args.commands))
        killed, wrong = run(command, each, Random(args.seed))
        add(f"kills/{command} kills", killed)
        failed += wrong
        print(f"{command}: {each} runs, {killed} killed before their end, {wrong} wrong recoveries,"
              f" {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
