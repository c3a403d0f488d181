"""Ctrl-C at random moments of real commands, mostly while a model loads. For `make soak`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from greenroom.interrupts import INTERRUPTED
from tests.cli.conftest import start
from tests.cli.test_simulate import machine as machine  # a fixture

COMMANDS = {
    "run": ("run", "demo", "Once", "--cache", "25%", "--max-new-tokens", 1900, "--temperature", 1),
    "chat": ("chat", "demo", "--cache", "25%", "--max-new-tokens", 1900),
    "serve": ("serve", "demo", "--port", 0, "--cache", "25%"),
    "pack": ("pack", "demo", "-o", "pack", "--experts", "int4"),
    "verify": ("verify", "demo", "--cache", "25%"),
    "bench": ("bench", "demo", "--cache", "25%", "--rounds", 9),
    "tune": ("tune", "demo", "--cache", "25%"),
    "doctor": ("doctor", "--quick", "-o", "machine.json"),
    "simulate": (
        "simulate", "t", "--policy", "lru,llru,lcp,arc,next-use", "--capacity", "10%,50%",
        "--prefetch", "off,markov", "--expert-bytes", "1MB", "--machine",
    ),
    "trace": ("trace", "record", "demo", "--prompts", "p.txt", "-o", "r", "--cache", "25%"),
}  # fmt: skip
TRIES = 10  # of each


def setting() -> None:
    """In the process: a group of its own, which Ctrl-C reaches at its first process alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()


def alive(group: int) -> list[str]:
    """Processes of a group; zombies have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, _, number = rest.split()[:3]
        if int(number) == group and state != "Z":
            found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(TRIES))
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_at_any_moment(command: str, number: int, tmp_path: Path, machine: Path) -> None:
    (tmp_path / "p.txt").write_text("Once upon a time\n" * 20)
    before = set(tmp_path.iterdir())
    asked = COMMANDS[command]
    if command == "simulate":
        synth = ("trace", "synth", "topics", "--tokens", 20_000, "-o", "t", "--layers", 8)
        assert start(*synth, cwd=tmp_path).wait(60) == 0
        before.add(tmp_path / "t")
        asked = (*asked, machine)
    process = start(
        *asked, cwd=tmp_path, preexec_fn=setting,
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stdin is not None
    process.stdin.write("Tell me a story.\n" * 50)  # chat answers each of them
    process.stdin.flush()
    first = process.stderr.readline()
    assert first, process.communicate()
    time.sleep(random.Random(f"{command}{number}").uniform(0, 12))
    if process.poll() is not None:
        pytest.skip("it had ended")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - began
    assert "Traceback" not in err
    assert "ignored" not in err
    if process.returncode in (0, -signal.SIGINT):  # of Python when all is done
        assert "interrupted" not in err
        return  # it was serving, and ended in order; or its work was done
    assert process.returncode == INTERRUPTED, err
    assert err.splitlines()[-1].startswith("greenroom: interrupted"), err
    assert took < 2
    left = {path.name for path in set(tmp_path.iterdir()) - before}
    assert left <= {"pack.unfinished", "r.journal"}  # with which the same command goes on
    until = time.monotonic() + 5
    while (there := alive(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)  # multiprocessing's own process notices that it is alone
    assert there == []
