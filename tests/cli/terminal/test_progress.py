"""The line about what is under way: live on a terminal, sparse in a file."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from greenroom.cli.terminal import progress as module
from greenroom.cli.terminal.progress import CLEAR, DownloadRate, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_file_has_a_line_at_once_and_then_few(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with Progress("starting") as progress:
        assert file.getvalue() == "starting ...\n"
        for done in range(100):
            clock[0] += 0.125
            progress.say("simulating", done, 100)
    few = file.getvalue().splitlines()
    assert few == [
        "starting ...", "simulating 39%, 8 s left ...", "simulating 79%, 3 s left ..."
    ]  # fmt: skip


def test_a_terminal_has_one_line_that_goes_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("starting") as progress:
        progress.say("loading", 1, 4)
        logging.getLogger("greenroom.test").warning("mind the step")
        progress.say("loading", 2, 4)
    assert terminal.getvalue() == "".join(
        (f"{CLEAR}starting ...", f"{CLEAR}loading 25% ...", f"{CLEAR}mind the step\n",
         f"{CLEAR}loading 50% ...", CLEAR)
    )  # fmt: skip
    assert not logging.getLogger("greenroom").handlers


COMMANDS = [
        ["run", "demo", "x"], ["chat", "demo"], ["serve", "demo"], ["verify", "demo"],
        ["verify", "demo", "--quality", "x"], ["pack", "demo", "-o", "x", "--experts", "int8"],
        ["bench", "demo"], ["tune", "demo"], ["plan", "demo", "--memory", "8GiB"], ["doctor"],
        ["doctor", "demo"], ["models"],
        ["trace", "info", "x"], ["trace", "import", "x", "-o", "y"],
        ["trace", "hot", "x", "--task", "all", "-o", "y"],
        ["trace", "budgets", "x", "--capacity", "1", "-o", "y"],
        ["trace", "synth", "zipf", "-o", "y"],
        ["simulate", "x", "--policy", "lru", "--capacity", "1"],
        ["train-predictor", "demo", "--trace", "x", "-o", "y"],
        ["train-policy", "demo", "--trace", "x"],
    ]  # fmt: skip
# One process for all: a module that is None is missing again for the next command.
WITHOUT_LIBRARIES = f"""
import contextlib, io, json, sys
from greenroom.cli import main
for name in ("torch", "numba", "transformers"):
    sys.modules[name] = None
for command in {COMMANDS}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with contextlib.suppress(ImportError):
            main(command)
    print(json.dumps([command, out.getvalue(), err.getvalue()]))
"""


def test_every_command_says_something_before_it_imports_what_takes_long(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True,
    )  # fmt: skip
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [command for command, _, _ in said] == COMMANDS
    for command, out, err in said:
        assert re.match(r".+ \.\.\.\n", err), (command, err)
        assert " ...\n" not in out


def test_a_download_has_a_rate_and_a_remaining_time(clock: list[float]) -> None:
    """What an earlier download left counts as done, and not for the rate."""
    lines: list[str] = []
    show = DownloadRate(SimpleNamespace(say=lines.append))  # type: ignore[arg-type]
    show(4 << 30, 16 << 30)
    clock[0] += 4
    show(5 << 30, 16 << 30)
    show(6 << 30, 16 << 30)  # too soon to be shown
    clock[0] += 4000
    show(8 << 30, 16 << 30)
    assert lines == [
        "downloading: 4 GiB of 16 GiB",
        "downloading: 5 GiB of 16 GiB, 268 MB/s, 44 s left",
        "downloading: 8 GiB of 16 GiB, 1.07 MB/s, 2.2 h left",
    ]


GARBAGE = """
import gc, weakref
from greenroom.cli.terminal.progress import collect_garbage

class Cache:
    pass

many = [[] for _ in range(1_000_000)]  # as imported libraries have
gc.collect()
gc.disable()
collect_garbage()
cache = Cache()
cache.itself = cache
gone = weakref.ref(cache)
gc.collect(1)  # it is old
del cache
later = [[] for _ in range(150_000)]  # as some thousand requests make
print(gone() is None)
"""


def test_old_garbage_does_not_wait_for_as_many_objects_as_libraries_have() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
