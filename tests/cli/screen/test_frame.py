"""Frames of the live screen, of a run and of a serving engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom import load
from greenroom.cli.screen.frame import ANSWER, EngineReader, ModelFacts, RunReader
from greenroom.config import SamplingConfig
from greenroom.hf.text.generate import answer
from tests.models import cached_tiny
from tests.server.rig import Served, draw

FOLDER = cached_tiny("qwen3_moe", tokenizer=True)


def test_frames_of_a_run() -> None:
    model, tokenizer = load(FOLDER, cache="25%")
    reader, seen = RunReader(model), list[Any]()
    assert reader.read().requests == ()
    try:
        answer(
            model, tokenizer, "Once upon a time", SamplingConfig(max_new_tokens=5, temperature=0),
            raw=True, context=64, to_the_end=True, on_start=reader.start,
            on_text=lambda text: seen.append(reader.read()),
        )  # fmt: skip
        last, stats = reader.read(), model.greenroom.stats()
        facts = ModelFacts.of("tiny", model.greenroom)
    finally:
        model.greenroom.close()
    assert facts.layers == (8, 8)
    assert (facts.title, facts.links) == ("tiny", ("disk -> host",))
    (request,) = last.requests
    assert (request.phase, request.new, request.most, last.tokens) == (ANSWER, 5, 5, 5)
    assert request.prompt > 0
    assert last.ttfts[0] > 0
    cache = last.cache
    assert sum(cache.hits) == stats.expert_hits
    assert sum(cache.misses) == stats.expert_requests - stats.expert_hits
    assert cache.links[0].nbytes == stats.bytes_read
    assert cache.memory.keys_values > 0
    assert cache.memory.slots == stats.capacity * stats.slot_bytes
    assert seen
    assert any(np.any(each.cache.used) for each in (*seen, last))


@pytest.fixture(scope="module")
def served() -> Any:
    engine = Served(FOLDER, capacity=8, max_batch=1)
    yield engine
    engine.close()


def test_frames_of_an_engine(served: Served) -> None:
    reader: Any = EngineReader(served.engine)
    before = reader.read()
    assert (before.tokens, before.ttfts, before.requests) == (0, (), ())
    served.ask(draw(20), 6).end()
    frame = reader.read()
    assert frame.tokens == 6
    assert len(frame.ttfts) == 1
    assert sum(frame.cache.hits) > 0
    assert frame.cache.used.any()
    assert not reader.read().cache.used.any()
