"""How a command ends early: Ctrl-C, a reader that left, a full disk, an error that verify found."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TextIO

import pytest

from greenroom.cli import main
from tests.cli.conftest import Ran, Run, start

LONG = ("The green room", "--cache", "13%", "--max-new-tokens", 200, "--kernels", "eager")
FULL = Path("/dev/full")


@pytest.mark.process
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


@pytest.fixture
def to(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`to(file)`: a long answer, in this process, whose standard output is this file."""

    def call(file: TextIO) -> Ran:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", file)
            code = main(["run", str(folder), *map(str, LONG), "--temperature", "2", "--seed", "1"])
        return Ran.of(code, *capfd.readouterr())

    return call


def test_a_reader_that_leaves(to: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        ran = to(file)
    assert ran.code == 141
    assert len(ran.err.splitlines()) == 1  # the start-up line


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output(to: Run) -> None:
    with open(FULL, "w") as full:
        ran = to(full)
    assert ran.code == 2
    assert ran.err.splitlines()[1:] == [
        "greenroom: cannot write the output: No space left on device"
    ]


def test_help_for_a_reader_that_has_left() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        process = start("run", "--help-all", stdout=file)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


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
    assert Ran.of(process.returncode, out, err).mistake == "the prompt is empty: give some text"


def test_an_interrupt_in_this_process(cli: Run, folder: Path, monkeypatch) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("greenroom.hf.text.generate.answer", stop)
    ran = cli("run", folder, *LONG)
    assert ran.code == 130
    assert ran.out == ""
    assert ran.err.splitlines()[1:] == ["greenroom: interrupted"]
