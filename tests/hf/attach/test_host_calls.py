"""The host's part of a decoded token takes few calls of Python, which a GPU would wait for.

Calls are counted, since times differ from machine to machine; `benchmarks/gpu_host_work.py` has the
times. The CPU stands in the GPU's place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import greenroom
from tests.hf.attach.graphs import placed_lru, prompt, tokens_of
from tests.hf.memory.test_device import ids
from tests.recorded_graphs import RecordedGraphs, Recording

pytestmark = pytest.mark.interpreted
PACKAGE = str(Path(greenroom.__file__).parent)
LAYERS = 2
# The most calls of a token: as one graph, in pieces, and further ones of layers that miss. They
# were 127, 245 and 34 when this was written; fewer are welcome.
WHOLE, PIECES, MISS = 130, 250, 40


class Calls:
    """Counts calls of this package's functions, and those that they make of compiled ones."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE):
            self.count += 1


class UncountedGraphs(RecordedGraphs):
    """Graphs whose replays are no calls of the host."""

    def _replay(self, recording: Recording) -> None:
        note = sys.getprofile()
        sys.setprofile(None)
        try:
            super()._replay(recording)
        finally:
            sys.setprofile(note)


def tokens_calls(monkeypatch: pytest.MonkeyPatch, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield the calls of a token, and how many experts it missed, all in host memory."""
    engine = UncountedGraphs(monkeypatch)
    with (
        placed_lru("qwen3_moe", monkeypatch, capacity, engine, host_capacity=1000) as model,
        torch.inference_mode(),
    ):
        cache, view = prompt(model, 60), model.greenroom.driver.scheduler.view
        assert len(model.greenroom.bindings.modules) == LAYERS
        tokens_of(model, cache, 6)
        for token in ids(8, 1):
            misses, calls = view.misses, Calls()
            with calls.counted():
                model(token[None], past_key_values=cache, use_cache=True)
            yield calls.count, view.misses - misses


@pytest.mark.parametrize(("capacity", "most"), [(1000, WHOLE), (12, PIECES)])
def test_a_token_that_misses_nothing_takes_few_calls(capacity, most, monkeypatch):
    """As one graph, and in pieces."""
    found = [calls for calls, misses in tokens_calls(monkeypatch, capacity) if not misses]
    assert found
    assert max(found) <= most


def test_a_token_that_misses_takes_few_calls_more(monkeypatch):
    found = [calls for calls, misses in tokens_calls(monkeypatch, 4) if misses]
    assert found
    assert min(found) <= PIECES + MISS
