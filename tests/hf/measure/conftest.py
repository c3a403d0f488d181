"""A small model that is loaded once for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from greenroom.config import LoadConfig
from greenroom.hf.measure.harness import Harness
from tests.models import cached_tiny

BASE = LoadConfig(cache="50%", prefetch="off", device="cpu", context=128)


@pytest.fixture
def harness(no_threads_left: None) -> Iterator[Harness]:
    built = Harness(str(cached_tiny("qwen3_moe", tokenizer=True)), BASE)
    try:
        yield built
    finally:
        built.close()
