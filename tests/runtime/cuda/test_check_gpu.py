"""`make check-gpu`: without a GPU it fails in one line, and all skipped is no success."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tests.gpu.conftest as wanted

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_it_fails_in_one_line(monkeypatch) -> None:
    monkeypatch.setattr(wanted, "REQUIRED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.UsageError, match=r"^tests/gpu: no CUDA device.*$"):
        wanted.pytest_configure(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "status"), [({"skipped": [1] * 83}, 1), ({"skipped": [1], "passed": [1]}, 0)]
)
def test_a_run_in_which_nothing_passes_fails(outcomes, status, monkeypatch) -> None:
    monkeypatch.setattr(wanted, "REQUIRED", True)
    reporter = SimpleNamespace(stats=outcomes)
    manager = SimpleNamespace(get_plugin=lambda name: reporter)
    session = SimpleNamespace(config=SimpleNamespace(pluginmanager=manager), exitstatus=0)
    wanted.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == status


def test_a_missing_triton_is_no_skip(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(wanted, "find_spec", lambda name: None)
    assert "Triton is not installed" in wanted.what_is_missing()


@pytest.mark.parametrize(("cores", "free", "processes"), [(16, 139, 8), (4, 139, 4), (16, 9, 2)])
def test_processes_fit_cores_and_memory(cores, free, processes, monkeypatch) -> None:
    monkeypatch.setattr(wanted, "REQUIRED", True)
    monkeypatch.setattr(wanted, "HOST_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 140 << 30))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert wanted.pytest_xdist_auto_num_workers(None) == processes  # type: ignore[arg-type]


def test_the_makefile_keeps_the_caller_s_python_and_path() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "check-gpu", "PYTHON=python-of-mine"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )  # fmt: skip
    parallel, sequential = done.stdout.strip().splitlines()
    for line in (parallel, sequential):
        assert 'PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" python-of-mine -m pytest' in line
    assert '-n auto --dist worksteal -m "not fills_memory"' in parallel
    assert sequential.endswith("-m fills_memory")
