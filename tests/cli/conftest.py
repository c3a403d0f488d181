"""Call the command line in this process, and as a process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import main
from tests.models import cached_tiny

START = "import sys; from greenroom.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code and both streams; `progress` are lines of standard error."""

    code: int
    out: str
    err: str
    progress: tuple[str, ...] = ()

    @classmethod
    def of(cls, code: int, out: str, err: str) -> Ran:
        """With the lines about what is under way apart from the others."""
        lines = err.splitlines(keepends=True)
        under_way = [line for line in lines if line.endswith(" ...\n")]
        rest = "".join(line for line in lines if line not in under_way)
        return cls(code, out, rest, tuple(line.strip() for line in under_way))

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one object and nothing else."""
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def mistake(self) -> str:
        """The one line of a command that failed with exit code 2."""
        assert self.code == 2, self.err
        return self.line

    @property
    def line(self) -> str:
        assert "Traceback" not in self.err
        assert self.err.startswith("greenroom: ")
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        return self.err.removeprefix("greenroom: ").strip()


Run = Callable[..., Ran]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], no_threads_left: None, still: None) -> Run:
    """`cli("run", folder, ...)`: what a user would get."""

    def call(*argv: object) -> Ran:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        out, err = capfd.readouterr()
        return Ran.of(code, out, err)

    return call


def start(*argv: object, before: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command line as a process of its own, which runs `before` first. Ctrl-C reaches it
    also where these tests run in the background of a shell, whose children ignore it."""
    command = [sys.executable, "-c", before + START, *map(str, argv)]
    options = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL), **options}
    pipe = subprocess.PIPE
    options = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, **options}
    return subprocess.Popen(command, text=True, **options)


@pytest.fixture(scope="session")
def folder() -> Path:
    """A tiny model that tests do not change."""
    return cached_tiny("qwen3_moe", tokenizer=True)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A tiny model to damage."""
    return Path(shutil.copytree(folder, tmp_path / "model"))
