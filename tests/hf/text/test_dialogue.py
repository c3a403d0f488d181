"""Dialogue: characters, chat templates, reasoning and tool calls."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.cli.serving import utils as serving
from transformers.utils.chat_parsing import ResponseParser

from greenroom.errors import UsageError
from greenroom.hf.text.dialogue import Dialogue, ReplyParser, ReplyPart, ToolCall
from tests.server.conftest import demo_tokenizer, thinker_tokenizer

QUESTION = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def plain() -> Dialogue:
    return Dialogue(demo_tokenizer(), "qwen3_moe")


@pytest.fixture(scope="module")
def thinker() -> Dialogue:
    return Dialogue(thinker_tokenizer(), "qwen3_moe")


def tokens_of(dialogue: Dialogue, text: str) -> list[int]:
    return list(dialogue.tokenizer(text, add_special_tokens=False)["input_ids"])


def parse_reply(dialogue: Dialogue, text: str, **options: Any) -> list[ReplyPart]:
    """The parts of an answer, with neighbours of one kind joined."""
    speaker = dialogue.reply_parser(dialogue.chat(QUESTION, **options))
    parts = [part for token in tokens_of(dialogue, text) for part in speaker.feed(token)]
    joined: list[ReplyPart] = []
    for part in [*parts, *speaker.end()]:
        last = joined[-1] if joined else None
        if last and part.text and last.text:
            joined[-1] = ReplyPart(last.text + part.text)
        elif last and part.reasoning and last.reasoning:
            joined[-1] = ReplyPart(reasoning=last.reasoning + part.reasoning)
        else:
            joined.append(part)
    return joined


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20))
def test_text_is_returned_in_complete_characters(text: str) -> None:
    dialogue = Dialogue(demo_tokenizer())
    speaker = ReplyParser(dialogue)
    ids = dialogue.encode(text)
    parts = [part.text for token in ids for part in speaker.feed(token)]
    parts += [part.text for part in speaker.end()]
    assert "".join(parts) == dialogue.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(6, 511), max_size=30))
def test_tokens_that_are_no_text_neither_fail_nor_vanish(ids: list[int]) -> None:
    dialogue = Dialogue(demo_tokenizer())
    speaker = ReplyParser(dialogue)
    parts = [part.text for token in ids for part in speaker.feed(token)]
    parts += [part.text for part in speaker.end()]
    assert "".join(parts) == dialogue.decode(ids)


def test_at_most_three_tokens_wait_for_the_end_of_a_character(plain: Dialogue) -> None:
    byte = [next(i for i in range(512) if plain.token_bytes(i) == bytes([b])) for b in (0xE4, 0x41)]
    speaker = ReplyParser(plain)
    lost = [speaker.feed(byte[0]) for _ in range(9)]
    assert sum(len(part.text) for parts in lost for part in parts) == 8
    assert speaker.feed(byte[1]) == [ReplyPart("\ufffdA")]


def test_the_bytes_of_tokens_are_those_of_the_text(plain: Dialogue) -> None:
    text = "Grüße 🎉 世界"
    assert b"".join(map(plain.token_bytes, plain.encode(text)[1:])) == text.encode()


def test_bytes_of_a_vocabulary_with_a_byte_fallback() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = [("<unk>", 0.0), ("▁a", -1.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    dialogue = Dialogue(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert dialogue.token_bytes(2 + 0xE4) == b"\xe4"
    speaker = ReplyParser(dialogue)
    parts = [speaker.feed(2 + byte) for byte in "世".encode()]
    assert parts == [[], [], [ReplyPart("世")]]


def test_a_model_without_a_template_only_completes_text(plain: Dialogue) -> None:
    from copy import copy

    tokenizer = copy(demo_tokenizer())
    tokenizer.chat_template = None
    dialogue = Dialogue(tokenizer)
    assert not dialogue.has_template
    with pytest.raises(UsageError, match="no chat template"):
        dialogue.chat(QUESTION)


def test_messages_on_which_a_template_fails_are_refused(plain: Dialogue) -> None:
    with pytest.raises(UsageError, match="fails on these messages"):
        plain.chat([{"role": "user"}])
    with pytest.raises(UsageError, match="fails on these messages"):
        plain.chat([{"role": "user", "content": 3}])


def test_a_begun_answer_is_continued(plain: Dialogue) -> None:
    begun = plain.chat([*QUESTION, {"role": "assistant", "content": "The sky"}], resume=True)
    assert plain.decode(begun, special=True).endswith("<|assistant|>The sky")


def test_the_kind_of_model_alone_does_not_make_a_parser(plain: Dialogue) -> None:
    assert not plain.supports_tools
    assert plain.reply_parser(plain.chat(QUESTION))._parser is None


def test_reasoning_and_text_are_separated(thinker: Dialogue) -> None:
    assert thinker.reply_parser(thinker.chat(QUESTION))._parser is not None
    reply = parse_reply(thinker, "<think>\nHm, well.</think>\n\nHello!<|im_end|>")
    assert reply == [ReplyPart(reasoning="Hm, well."), ReplyPart("Hello!")]


def test_reasoning_that_the_template_has_begun_or_ended(thinker: Dialogue) -> None:
    assert parse_reply(thinker, "Hello!<|im_end|>", enable_thinking=False)[-1] == ReplyPart(
        "Hello!"
    )


def test_calls_are_json_and_their_arguments_of_the_tools_types(thinker: Dialogue) -> None:
    assert thinker.supports_tools
    text = 'Wait.<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    reply = parse_reply(thinker, text + "<|im_end|>", tools=[TOOL])
    assert reply[0] == ReplyPart("Wait.")
    assert reply[1].call == ToolCall("look", json.dumps({"place": "here"}))


@pytest.mark.parametrize(
    "call", ["<tool_call>{nonsense}</tool_call>", "<tool_call>3</tool_call>", "<tool_call>{"]
)
def test_a_malformed_call_is_text(thinker: Dialogue, call: str) -> None:
    reply = parse_reply(thinker, f"Well.{call} And on")
    assert all(part.call is None for part in reply)
    text = "".join(part.text for part in reply)
    assert text.startswith("Well.")
    assert call.removeprefix("<tool_call>")[:2] in text
    if call.endswith("</tool_call>"):
        assert text.endswith("And on")


def test_template_uses_finds_the_variables_of_a_template(thinker: Dialogue) -> None:
    assert thinker.template_uses("enable_thinking")
    assert not thinker.template_uses("reasoning_effort")
    assert thinker.supports_reasoning


class TestCanaries:
    """Semi-private names of transformers: what they must still be."""

    def test_the_response_template_of_a_kind_of_model(self) -> None:
        config = type("Config", (), {"model_type": "qwen3_moe"})
        model = type("Model", (), {"config": config})
        response_template = serving.get_response_template(demo_tokenizer(), model)
        assert {"reasoning_content", "tool_calls", "content"} <= set(response_template["fields"])

    def test_the_parser_and_what_becomes_of_its_events(self) -> None:
        assert list(inspect.signature(ResponseParser).parameters) == [
            "response_template", "prefix", "tools",
        ]  # fmt: skip
        events = [
            {"type": "region_chunk", "field": "content", "text": "a", "dirty": False},
            {"type": "region_chunk", "field": "reasoning_content", "text": "b", "dirty": False},
            {"type": "region_close", "field": "tool_calls",
             "value": {"function": {"name": "f", "arguments": {}}}},
        ]  # fmt: skip
        text, reasoning, call = serving.response_events_to_chunks(events)
        assert text == "a"
        assert isinstance(reasoning, serving.ReasoningText)
        assert isinstance(call, serving.ToolCall)
        assert (call.name, call.arguments) == ("f", "{}")
