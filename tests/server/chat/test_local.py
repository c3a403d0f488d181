"""A conversation with a model in the same process."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config import SamplingConfig
from greenroom.errors import GreenroomError, StoreError
from greenroom.server.chat.local import LocalBackend, wait_until_loaded
from greenroom.server.engine.tokens.reader import AnswerDelta
from tests.server.conftest import fake_engine, reasoning_engine

QUESTION: Any = [{"role": "user", "content": "Hello"}]


def test_an_answer_is_streamed_and_counted() -> None:
    engine = reasoning_engine("<think>Hm.</think>Hello there!", reused=4)
    parts: list[AnswerDelta] = []
    reply = LocalBackend(engine, SamplingConfig(seed=3, temperature=0.5)).answer(
        QUESTION, parts.append
    )
    assert (reply.reasoning, reply.text, reply.reason) == ("Hm.", "Hello there!", "stop")
    assert "".join(part.text for part in parts) == "Hello there!"
    assert (reply.reused_tokens, reply.new_tokens) == (4, engine.tickets[0].sent_tokens)
    sampling = engine.tickets[0].request.sampling
    assert (sampling.seed, sampling.temperature) == (3, 0.5)


def test_ctrl_c_ends_the_answer_and_keeps_its_text() -> None:
    engine = fake_engine("word " * 100, delay_s=0.005)

    def interrupt(delta: AnswerDelta) -> None:
        if len(engine.tickets) and engine.tickets[0].sent_tokens > 5:
            raise KeyboardInterrupt

    backend = LocalBackend(engine, SamplingConfig())
    reply = backend.answer(QUESTION, interrupt)
    assert reply.reason == "cancelled"
    assert reply.text.startswith("word")
    assert engine.tickets[0].cancelled.is_set()
    assert backend.answer(QUESTION, lambda delta: None).reason == "stop"


def test_an_error_in_an_answer_is_raised() -> None:
    engine = fake_engine("one two three")
    engine.failing, engine.fail_after = StoreError("the disk"), 2
    with pytest.raises(StoreError, match="the disk"):
        LocalBackend(engine, SamplingConfig()).answer(QUESTION, lambda delta: None)


def test_a_model_without_a_template_continues_the_message() -> None:
    from copy import copy

    engine = fake_engine(" there")
    engine.tokenizer = copy(engine.tokenizer)
    engine.tokenizer.chat_template = None
    assert (
        LocalBackend(engine, SamplingConfig()).answer(QUESTION, lambda delta: None).text == " there"
    )
    assert engine.tokenizer.decode(engine.tickets[0].request.ids) == "<|begin|>Hello"


def test_an_answer_is_bounded_by_the_context() -> None:
    engine = fake_engine("one two three", context=16)
    backend = LocalBackend(engine, SamplingConfig(max_new_tokens=100))
    backend.answer(QUESTION, lambda delta: None)
    request = engine.tickets[0].request
    assert len(request.ids) + request.max_new_tokens == 16


def test_wait_until_loaded_shows_progress_and_raises_errors() -> None:
    engine = fake_engine("Hi")
    progress_values: list[float] = []

    def show(progress: float) -> None:
        progress_values.append(progress)
        engine.now = ("ready", 1.0, "")

    engine.now = ("loading", 0.5, "")
    wait_until_loaded(engine, show)
    assert progress_values == [0.5]
    engine.now = ("failed", 0.5, "a shard is missing")
    with pytest.raises(GreenroomError, match="a shard is missing"):
        wait_until_loaded(engine, show)
