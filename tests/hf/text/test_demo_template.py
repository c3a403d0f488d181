"""The demo model's chat template: prompts as trained, and tools that the server can parse."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from greenroom.hf.text.calls import CallFormat, find_call_format
from greenroom.hf.text.dialogue import Dialogue, ReplyPart, ToolCall
from tests.server.conftest import DEMO, demo_tokenizer

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
QUESTION = [{"role": "user", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be kind."}


@cache
def demo() -> Dialogue:
    return Dialogue(AutoTokenizer.from_pretrained(DEMO), "qwen3_moe")


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_prompts_without_tools_are_those_of_the_training(messages: Any, begins: bool) -> None:
    options: Any = {"tokenize": False, "add_generation_prompt": begins}
    trained = demo_tokenizer().apply_chat_template(messages, **options)
    for tools in (None, []):
        shipped = demo().tokenizer.apply_chat_template(messages, tools=tools, **options)
        assert shipped.encode() == trained.encode()


def test_tools_calls_and_results_are_rendered() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": {"at": 'é"'}}}
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "a wall"}
    text = demo().decode(demo().chat([SYSTEM, *QUESTION, answer, result], [TOOL]), special=True)
    system, user, called, response, rest = text.removeprefix("<|begin|>").split("<|end|>")
    assert system.startswith("<|system|>Be kind.\n\nTools:\n")
    assert json.loads(system.splitlines()[3]) == TOOL["function"]
    assert user == "<|user|>Hello"
    call_text = '<tool_call>{"name": "look", "arguments": {"at": "é\\""}}</tool_call>'
    assert called == f"<|assistant|>I look.{call_text}"
    assert response == "<|user|><tool_response>a wall</tool_response>"
    assert rest == "<|assistant|>"


def test_calls_are_parsed_and_their_format_is_found() -> None:
    dialogue = demo()
    assert (dialogue.supports_tools, dialogue.supports_reasoning) == (True, False)
    prompt = dialogue.chat(QUESTION, [TOOL])
    form = find_call_format(dialogue, prompt, [TOOL])
    before, after = '<tool_call>{"name": "', "}</tool_call>"
    assert form == CallFormat(before, '", "arguments": ', after, True)
    parser = dialogue.reply_parser(prompt, [TOOL])
    text = form.call("look", '{"place": "here"}')
    ids = dialogue.tokenizer(text + "<|end|>", add_special_tokens=False)["input_ids"]
    parts = [part for token in ids for part in parser.feed(token)] + parser.end()
    assert parts == [ReplyPart(call=ToolCall("look", '{"place": "here"}'))]


def test_text_is_not_changed_by_the_parser() -> None:
    dialogue = demo()
    end_token = [dialogue.tokenizer.eos_token_id]
    cases: list[tuple[str, list[int]]] = [
        *((text, end) for text in ("Hello  there\n\n", " a <b> <tool") for end in ([], end_token)),
        ("<tool_call>{nonsense}</tool_call>", []),
    ]
    for text, end in cases:
        ids = dialogue.tokenizer(text, add_special_tokens=False)["input_ids"]
        parser = dialogue.reply_parser(dialogue.chat(QUESTION))
        parts = [part for token in [*ids, *end] for part in parser.feed(token)] + parser.end()
        assert "".join(part.text for part in parts) == text


def test_the_shipped_files_are_those_that_training_writes() -> None:
    path = DEMO.parent / "training" / "chat.py"
    spec = importlib.util.spec_from_file_location("demo_training_chat", path)
    assert spec is not None
    assert spec.loader is not None
    chat = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chat)
    assert (DEMO / "chat_template.jinja").read_text() == chat.TEMPLATE
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert config["response_template"] == chat.RESPONSE_TEMPLATE
