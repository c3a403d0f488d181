"""Compiling in a second process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom.runtime.kernels import ahead, source

NO_TORCH = """
import sys
sys.modules["torch"] = None
from greenroom.runtime.kernels.ahead import compile_all
compile_all("float16")
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_child", None)
    return tmp_path


def test_all_is_compiled_and_kept_without_torch(kept):
    def run() -> set[str]:
        subprocess.run([sys.executable, "-c", NO_TORCH], check=True)
        return {path.name for path in kept.rglob("*.nbc")}

    first = run()
    assert len(first) == 10
    assert ahead._marker("float16").exists()
    assert run() == first  # found, not made again


class Child:
    """A process that ends when it is waited for, or not at all."""

    def __init__(self, command: list[str], patient: bool = True, **_: object) -> None:
        self.command, self.patient, self.said = command, patient, list[str]()

    def wait(self, timeout: float) -> None:
        self.said.append("waited")
        if not self.patient:
            raise subprocess.TimeoutExpired("x", timeout)

    def kill(self) -> None:
        self.said.append("killed")


def test_begun_once_where_it_is_needed(kept, monkeypatch):
    started: list[Child] = []

    def popen(command: list[str], **options: object) -> Child:
        started.append(Child(command, **options))
        return started[-1]

    monkeypatch.setattr(ahead.subprocess, "Popen", popen)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ahead.start("bfloat16")
    ahead.start("bfloat16")
    assert [child.command[-1] for child in started] == ["bfloat16"]
    ahead.wait()
    ahead.wait()
    assert started[0].said == ["waited"]
    ahead.start("bfloat16")
    assert len(started) == 2
    started[1].patient = False
    ahead.wait()
    assert started[1].said == ["waited", "killed"]
    ahead._marker("bfloat16").touch()
    ahead.start("bfloat16")
    assert len(started) == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    ahead.start("float16")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "access", lambda *_: False)
    ahead.start("float16")
    assert len(started) == 2


def test_another_source_is_another_marker(kept, monkeypatch):
    before = ahead._marker("bfloat16")
    monkeypatch.setattr(source, "stamp", lambda: 1)
    assert ahead._marker("bfloat16") != before
    assert ahead._marker("bfloat16").parent == kept
