"""Surroundings that are not as usual: shared, read-only, stopped, with a clock that jumps."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, start

PROMPT = ("Once upon a time", "--raw", "--cache", "25%", "--temperature", 0, "--json")
YEAR_S = 365 * 86400.0


def ids_of(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return json.loads(out)["token_ids"]


def run(home: Path | str, tokens: int = 24) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "GREENROOM_LEARNED": "on"}
    return start("run", "demo", *PROMPT, "--max-new-tokens", tokens, env=environment)


@pytest.mark.process
@pytest.mark.timeout(240)
def test_two_processes_share_what_runs_leave(tmp_path: Path) -> None:
    expected = ids_of(run(tmp_path))
    together = [run(tmp_path) for _ in range(2)]
    assert [ids_of(each) for each in together] == [expected, expected]
    assert ids_of(run(tmp_path)) == expected
    left = [path.name for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert left == []


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_home_that_cannot_be_written_changes_no_answer(tmp_path: Path) -> None:
    expected = ids_of(run(tmp_path / "home"))
    assert ids_of(run("/dev/null/home")) == expected


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_process_that_sleeps_goes_on(tmp_path: Path) -> None:
    """As a machine that is suspended: the clock goes on, the process does not."""
    expected = ids_of(run(tmp_path, 150))
    process = run(tmp_path, 150)
    for _ in range(3):
        time.sleep(1.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
    assert ids_of(process) == expected


def test_a_clock_that_jumps_changes_no_answer(
    cli: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock; durations come from another one, which does not jump."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GREENROOM_LEARNED", "on")
    options = ("--raw", "--cache", "25%", "--max-new-tokens", 6, "--temperature", 0, "--json")
    expected = cli("run", folder, "Once", *options).json["token_ids"]
    clock, chance = time.time, random.Random(0)
    monkeypatch.setattr(time, "time", lambda: clock() + YEAR_S * chance.uniform(-40, 40))
    for _ in range(2):
        ran = cli("run", folder, "Once", *options)
        assert ran.json["token_ids"] == expected
    monkeypatch.setattr(time, "time", clock)
    assert cli("run", folder, "Once", *options).json["token_ids"] == expected
