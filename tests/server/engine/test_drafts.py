"""Answers with speculation are those without it, token by token and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.core.speculation import speculation
from greenroom.server.engine.requests import Sampling
from tests.models import cached_tiny
from tests.server.rig import Served, draw

FAST = {"hidden_size": 64, "head_dim": 16}


class EagerTimes:
    """Times of passes by which every draft is worth it."""

    is_ready = True

    def record(self, tokens: int, seconds: float) -> None:
        pass

    def seconds(self, tokens: int) -> float:
        return 1.0


@pytest.fixture
def engines(monkeypatch: Any, no_threads_left: None) -> Iterator[Any]:
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", **FAST)
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(folder, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


# A low temperature, and a prompt that repeats itself.
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.7, seed=5),
    "cut": Sampling(temperature=0.5, top_p=0.9, top_k=20, seed=6),
    "penalties": Sampling(temperature=0.5, repetition_penalty=1.05, presence_penalty=0.1, seed=7),
}


def test_x(engines):
    s=engines(speculate="lookup"); p=engines()
    for name, sampling in SETTINGS.items():
        for seed in range(3):
            prompt=draw(12,seed)*3
            a=s.ask(prompt,60,sampling=sampling, top_logprobs=3); a.end()
            b=p.ask(prompt,60,sampling=sampling, top_logprobs=3); b.end()
            print(name, a.tokens==b.tokens, a.finished.reason, len(a.ids), len(set(a.ids)))
    print(s.engine.stats()['speculation'], s.engine.stats()['passes'], s.engine.summary)
    assert 0
