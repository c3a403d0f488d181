"""Compiling in a second process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom.core.compiling.compile_folder import folder
from greenroom.runtime.kernels import precompile

NO_TORCH = """
import sys
sys.modules["torch"] = None
from greenroom.runtime.kernels.precompile import compile_all
compile_all("bfloat16")
"""
NO_COMPILER = "from numba.core.ccallback import CFunc; CFunc._compile_uncached = None"


@pytest.fixture
def compile_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "_child", None)
    return folder()


def test_all_kernels_are_compiled_and_cached_without_torch():
    """The compile cache is the one of other tests, which need the same kernels."""
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True)
    assert precompile._marker("bfloat16").exists()
    subprocess.run(
        [sys.executable, "-c", NO_COMPILER + NO_TORCH], check=True
    )  # nothing is compiled again


class Child:
    """A process that ends when it is waited for, or not at all."""

    def __init__(self, command: list[str], patient: bool = True, **_: object) -> None:
        self.command, self.patient, self.calls = command, patient, list[str]()

    def wait(self, timeout: float) -> None:
        self.calls.append("waited")
        if not self.patient:
            raise subprocess.TimeoutExpired("x", timeout)

    def kill(self) -> None:
        self.calls.append("killed")


def test_the_compiling_process_starts_once_and_only_if_needed(compile_folder, monkeypatch):
    started: list[Child] = []

    def popen(command: list[str], **options: object) -> Child:
        started.append(Child(command, **options))
        return started[-1]

    monkeypatch.setattr(precompile.subprocess, "Popen", popen)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    precompile.start_compiling("bfloat16")
    precompile.start_compiling("bfloat16")
    assert [child.command[-1] for child in started] == ["bfloat16"]
    precompile.wait_for_compiling()
    precompile.wait_for_compiling()
    assert started[0].calls == ["waited"]
    precompile.start_compiling("bfloat16")
    assert len(started) == 2
    started[1].patient = False
    precompile.wait_for_compiling()
    assert started[1].calls == ["waited", "killed"]
    precompile._marker("bfloat16").touch()
    precompile.start_compiling("bfloat16")
    assert len(started) == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    precompile.start_compiling("float16")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "access", lambda *_: False)
    precompile.start_compiling("float16")
    assert len(started) == 2


def test_a_changed_source_changes_the_marker(compile_folder, monkeypatch):
    before = precompile._marker("bfloat16")
    monkeypatch.setattr(precompile, "_sources", lambda: "another")
    assert precompile._marker("bfloat16") != before
    assert precompile._marker("bfloat16").parent == compile_folder
