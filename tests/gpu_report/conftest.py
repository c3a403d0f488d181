"""The report's modules lie in a folder of their own, and are imported from there for one test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from greenroom.hf.memory import devices as places

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu_report"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A function that imports one of the report's modules."""
    monkeypatch.setattr(places, "engine_for", places.engine_for)  # a rehearsal replaces it
    monkeypatch.syspath_prepend(str(FOLDER.parent / "replay"))
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and FOLDER.parent in Path(file).parents:
            del sys.modules[name]
