"""A conversation with a model in the same process."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config import SamplingConfig
from greenroom.errors import GreenroomError, StoreError
from greenroom.server.chat.local import LocalBackend, wait_until_loaded
from greenroom.server.engine.tokens.reader import AnswerDelta
from tests.server.conftest import saying, thinking

ASKED: Any = [{"role": "user", "content": "Hello"}]


def test_an_answer_comes_in_parts_and_is_counted() -> None:
    engine = thinking("<think>Hm.</think>Hello there!", reused=4)
    parts: list[AnswerDelta] = []
    reply = LocalBackend(engine, SamplingConfig(seed=3, temperature=0.5)).answer(
        ASKED, parts.append
    )
    assert (reply.reasoning, reply.text, reply.reason) == ("Hm.", "Hello there!", "stop")
    assert "".join(part.text for part in parts) == "Hello there!"
    assert (reply.reused_tokens, reply.new_tokens) == (4, engine.tickets[0].told)
    sampling = engine.tickets[0].request.sampling
    assert (sampling.seed, sampling.temperature) == (3, 0.5)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    engine = saying("word " * 100, delay_s=0.005)

    def interrupt(delta: AnswerDelta) -> None:
        if len(engine.tickets) and engine.tickets[0].told > 5:
            raise KeyboardInterrupt

    voice = LocalBackend(engine, SamplingConfig())
    reply = voice.answer(ASKED, interrupt)
    assert reply.reason == "cancelled"
    assert reply.text.startswith("word")
    assert engine.tickets[0].cancelled.is_set()
    assert voice.answer(ASKED, lambda delta: None).reason == "stop"


def test_an_error_in_the_middle_is_the_users_to_see() -> None:
    engine = saying("one two three")
    engine.failing, engine.fail_after = StoreError("the disk"), 2
    with pytest.raises(StoreError, match="the disk"):
        LocalBackend(engine, SamplingConfig()).answer(ASKED, lambda delta: None)


def test_a_model_without_a_template_goes_on_with_what_is_said() -> None:
    from copy import copy

    engine = saying(" there")
    engine.tokenizer = copy(engine.tokenizer)
    engine.tokenizer.chat_template = None
    assert LocalBackend(engine, SamplingConfig()).answer(ASKED, lambda delta: None).text == " there"
    assert engine.tokenizer.decode(engine.tickets[0].request.ids) == "<|begin|>Hello"


def test_an_answer_has_the_room_that_the_context_has() -> None:
    engine = saying("one two three", context=16)
    voice = LocalBackend(engine, SamplingConfig(max_new_tokens=100))
    voice.answer(ASKED, lambda delta: None)
    request = engine.tickets[0].request
    assert len(request.ids) + request.max_new_tokens == 16


def test_loading_is_waited_for() -> None:
    engine = saying("Hi")
    seen: list[float] = []

    def show(progress: float) -> None:
        seen.append(progress)
        engine.now = ("ready", 1.0, "")

    engine.now = ("loading", 0.5, "")
    wait_until_loaded(engine, show)
    assert seen == [0.5]
    engine.now = ("failed", 0.5, "a shard is missing")
    with pytest.raises(GreenroomError, match="a shard is missing"):
        wait_until_loaded(engine, show)
