"""Settings and fixtures of all tests: no network, no progress bars, no thread left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.core.compiling.compile_folder import folder
from tests.interpreter import improve_interpreter

# Before huggingface_hub and transformers are imported, also in subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("GREENROOM_LEARNED", "off")  # every cache starts cold, nothing is stored
# Two workers with two threads each would wait for each other longer than tiny models compute: up to
# 4 ms an operation. Tests of several threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled code is found also where a test gives the user another cache folder.
os.environ.setdefault("NUMBA_CACHE_DIR", str(folder().parents[1]))
if os.environ.get("GREENROOM_TEST_GPU") != "1":  # a machine's GPU is for `make check-gpu` alone
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Read when a kernel is defined: before any is imported. `make check-gpu-offline` has 0.
    os.environ.setdefault("TRITON_INTERPRET", "1")
SETTINGS = "_hypothesis_internal_use_settings"  # attribute with the settings of a test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Try a third of hypothesis's examples; `make soak` tries all (GREENROOM_TEST_EXAMPLES=all)."""
    if os.environ.get("GREENROOM_TEST_EXAMPLES") == "all":
        return
    for function in {item.obj for item in items if isinstance(item, pytest.Function)}:
        if (settings := getattr(function, SETTINGS, None)) is not None:
            few = max(5, settings.max_examples // 3)
            setattr(function, SETTINGS, type(settings)(settings, max_examples=few))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give Triton's interpreter a device's rounding, if a test may need it."""
    marked = (each.get_closest_marker("interpreted") for each in session.items)
    if "triton" in sys.modules or any(marked):
        improve_interpreter()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of interpreted kernels where they are compiled."""
    if os.environ.get("GREENROOM_TEST_GPU") == "1" and item.get_closest_marker("interpreted"):
        pytest.skip("tests/gpu has the compiled ones")


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose the library of compiled kernels again in this test, and in those after it."""
    from greenroom.runtime.kernels.native import library as native  # torch: after the settings

    monkeypatch.delenv("GREENROOM_SIMD", raising=False)
    cached = native.library, native.missing_reason
    for function in cached:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


@pytest.fixture
def no_kernels(fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without compiled kernels."""
    monkeypatch.setattr(
        "greenroom.runtime.kernels.native.library.FOLDER", tmp_path / "no-libraries"
    )


def threads() -> set[threading.Thread]:
    """Return Greenroom's threads that live now."""
    return {each for each in threading.enumerate() if each.name.startswith("greenroom")}


@pytest.fixture(scope="session", autouse=True)
def all_is_collected_in_the_end() -> Iterator[None]:
    """Unfreeze the collector at the end: some libraries count their instances as Python ends."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def libraries_are_not_collected() -> None:
    """Freeze the objects that exist when a file begins.

    Every `load` collects garbage: a quarter of a second among the libraries' million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where this process was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """The test must end every reader thread that it starts."""
    before = threads()  # those of an earlier test may end meanwhile
    yield
    until = time.monotonic() + 5
    while not threads() <= before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= before


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the process's memory at 400 MiB: budgets count it, and earlier tests make it grow."""
    for module in ("memory.budget", "load.describe", "load.attach"):
        monkeypatch.setattr(f"greenroom.hf.{module}.rss_bytes", lambda: 400 << 20)
