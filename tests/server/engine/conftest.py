"""Engines over a tiny model, and the same model in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.models import cached_tiny, reference
from tests.server.rig import Served

MIXED = [(5, 9), (40, 3), (1, 12), (17, 6), (90, 4), (1, 10)]  # tokens of prompts and answers


@pytest.fixture(scope="module")
def folder() -> Any:
    return cached_tiny("qwen3_moe", tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Any) -> Any:
    return reference(folder)


@pytest.fixture
def served(folder: Any, no_threads_left: None) -> Iterator[Any]:
    engines: list[Served] = []

    def make(**options: Any) -> Served:
        engines.append(Served(folder, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.fixture(scope="module")
def plain(folder: Any) -> Iterator[Served]:
    engine = Served(folder)
    yield engine
    engine.close()
