"""`run` with speculation writes the text of `run` without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import greenroom
from greenroom.config import SamplingConfig
from greenroom.core.speculation import speculation
from greenroom.hf.kv import batch, draft_pass
from greenroom.hf.text.drafting import DraftedLoop
from greenroom.hf.text.generate import answer
from tests.emulated_gpu import emulated_gpus
from tests.models import cached_tiny
from tests.server.engine.test_drafts import EagerTimes, bfloat16_folder

PROMPT = "The green the green the green the green"
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.6, "seed": 3},
    "cut": {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 4},
}


@pytest.fixture(scope="module")
def ready() -> Iterator[Any]:
    folder = bfloat16_folder()
    model, tokenizer = greenroom.load(str(folder), cache="50%")
    yield model, tokenizer
    model.greenroom.detach()


@pytest.fixture
def loop(ready: Any, monkeypatch: Any) -> DraftedLoop:
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)
    made = DraftedLoop(ready[0])
    made.speculation.guard.passed = lambda *args: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_of_transformers_loop(ready: Any, loop: DraftedLoop, name: str) -> None:
    for count in (1, 2, 3, 50, 120):
        sampling = SamplingConfig(max_new_tokens=count, **SAMPLINGS[name])
        plain_pieces: list[str] = []
        pieces: list[str] = []
        plain = answer(*ready, PROMPT, sampling, context=256, on_text=plain_pieces.append)
        drafted = answer(*ready, PROMPT, sampling, context=256, on_text=pieces.append, loop=loop)
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert pieces == plain_pieces  # as they are streamed
        assert len(drafted.gaps) == len(plain.gaps)
    assert loop.speculation.counts.passes > 0
    assert loop.speculation.counts.accepted > 0


def test_processors_and_ends_are_those_of_transformers_loop(
    ready: Any, loop: DraftedLoop, monkeypatch: Any
) -> None:
    settings = ready[0].generation_config
    monkeypatch.setattr(settings, "repetition_penalty", 1.05)
    sampling = SamplingConfig(max_new_tokens=60, temperature=0.6, seed=3)
    options = {"context": 256, "to_the_end": True}
    plain = answer(*ready, PROMPT, sampling, **options)
    assert answer(*ready, PROMPT, sampling, **options, loop=loop).token_ids == plain.token_ids
    monkeypatch.setattr(settings, "eos_token_id", plain.token_ids[20])
    plain = answer(*ready, PROMPT, sampling, context=256)
    assert plain.new_tokens <= 21
    assert answer(*ready, PROMPT, sampling, context=256, loop=loop).token_ids == plain.token_ids


def test_an_answer_ends_with_the_context(ready: Any, loop: DraftedLoop) -> None:
    sampling = SamplingConfig(max_new_tokens=300, temperature=0)
    plain = answer(*ready, PROMPT, sampling, context=40)
    drafted = answer(*ready, PROMPT, sampling, context=40, loop=loop)
    assert drafted.cut_short
    assert drafted.token_ids == plain.token_ids


def test_beam_search_has_no_drafts(ready: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(ready[0].generation_config, "num_beams", 2)
    made = DraftedLoop(ready[0])
    assert made.description == (
        "no speculation: the model's generation config asks for beam_search"
    )
    assert made.options(None) == {}  # type: ignore[arg-type]


def test_answers_on_a_gpu_have_drafts(monkeypatch: Any, no_threads_left: None) -> None:
    """In float32, whose rounding is too small to change a token."""
    emulated_gpus(monkeypatch)
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)
    folder = str(cached_tiny("qwen3_moe", tokenizer=True))
    model, tokenizer = greenroom.load(folder, cache="50%", device="cuda", kernels="eager")
    try:
        made = DraftedLoop(model)
        assert made.description == "speculation by lookup, which may change last bits"
        made.speculation.guard.passed = lambda *args: None  # type: ignore[method-assign]
        sampling = SamplingConfig(max_new_tokens=30, temperature=0)
        plain = answer(model, tokenizer, PROMPT, sampling, context=256)
        drafted = answer(model, tokenizer, PROMPT, sampling, context=256, loop=made)
        assert drafted.token_ids == plain.token_ids
        assert made.speculation.counts.accepted > 0
        monkeypatch.setattr(batch, "is_near", lambda *args: False)
        monkeypatch.setattr(draft_pass, "is_near", lambda *args, **options: False)
        assert DraftedLoop(model).obstacle
    finally:
        model.greenroom.detach()
