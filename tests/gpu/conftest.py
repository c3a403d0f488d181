"""Tests on a GPU: `make check-gpu`. Elsewhere they skip themselves.

With GREENROOM_TEST_GPU=1 a GPU is required: a run without one, or in which no test passes, fails.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from greenroom.errors import VersionError

REQUIRED = os.environ.get("GREENROOM_TEST_GPU") == "1"
HOST_BYTES, GPU_BYTES = 6 << 30, 4 << 30  # of a process of tests, generously
MOST = 8  # processes: what they wait for is mostly Triton's compiler


def pytest_configure(config: pytest.Config) -> None:
    if REQUIRED and (missing := what_is_missing()):
        raise pytest.UsageError(f"tests/gpu: {missing}")


def what_is_missing() -> str:
    """Why the tests cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "no CUDA device answers" if built else "no CUDA device: torch was built without CUDA"
    if find_spec("triton") is None:
        return "Triton is not installed: its kernels would be skipped"
    try:
        import greenroom.hf  # noqa: F401
    except VersionError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many processes as cores, host memory and the GPU's memory allow."""
    if not (REQUIRED and torch.cuda.is_available()):
        return None
    import psutil

    free, _ = torch.cuda.mem_get_info()
    room = min(psutil.virtual_memory().available // HOST_BYTES, free // GPU_BYTES)
    return int(max(1, min(MOST, os.cpu_count() or 1, room)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run whose tests all skip is no success."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if REQUIRED and reporter is not None and not reporter.stats.get("passed"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
