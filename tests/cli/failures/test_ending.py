"""How a command ends early: Ctrl-C, a reader that left, a full disk, an error that verify found."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Ran, Run, start

LONG = ("The green room", "--cache", "13%", "--max-new-tokens", 200, "--kernels", "eager")
FULL = Path("/dev/full")


def test_ctrl_c_while_it_answers() -> None:
    asked = ("--cache", "13%", "--temperature", 2, "--seed", 1, "--max-new-tokens", 1900)
    process = start("run", "demo", "The green room", *asked, "--device", "fake")
    assert process.stdout
    assert process.stderr
    assert process.stderr.readline() == "demo: starting ...\n"
    assert process.stdout.read(1)  # it is answering
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    started, line = Ran.of(process.returncode, out, err).err.splitlines()
    assert "experts in slots" in started
    assert line == "greenroom: interrupted"
    assert process.returncode == 130
    assert out.endswith("\n")


def test_a_reader_that_leaves(folder: Path) -> None:
    process = start("run", folder, *LONG, "--temperature", 2, "--seed", 1)
    assert process.stdout
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr
    err = process.stderr.read()
    assert process.wait(30) == 141
    assert len(Ran.of(141, "", err).err.splitlines()) == 1  # the start-up line


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output(folder: Path) -> None:
    with open(FULL, "w") as full:
        process = start("run", folder, *LONG, stdout=full)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    _, line = Ran.of(2, "", err).err.splitlines()
    assert line == "greenroom: cannot write the output: No space left on device"


def test_help_into_a_full_disk() -> None:
    if not FULL.exists():
        pytest.skip("no /dev/full here")
    with open(FULL, "w") as full:
        process = start(stdout=full)
        _, err = process.communicate(timeout=60)
    assert Ran.of(process.returncode, "", err).mistake == "cannot write the output: " + os.strerror(
        28
    )


def test_no_standard_input_at_all(folder: Path) -> None:
    process = start("run", folder, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=60)
    assert Ran.of(process.returncode, out, err).mistake == "the prompt is empty"


def test_an_interrupt_in_this_process(cli: Run, folder: Path, monkeypatch) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("greenroom.hf.text.generate.answer", stop)
    ran = cli("run", folder, *LONG)
    assert ran.code == 130
    assert ran.out == ""
    assert ran.err.splitlines()[1:] == ["greenroom: interrupted"]
