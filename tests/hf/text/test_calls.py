"""The format of tool calls is learned from chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.hf.text.calls import find_call_format
from greenroom.hf.text.dialogue import Dialogue
from tests.server.conftest import thinker_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
}
CALL = '{"name": "look", "arguments": {}}'


def dialogue(template: str | None = None, model_type: str = "qwen3_moe") -> Dialogue:
    tokenizer = thinker_tokenizer()
    if template is not None:
        tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
    return Dialogue(tokenizer, model_type)


def call_format(one: Dialogue, **variables: Any) -> Any:
    return find_call_format(
        one, one.chat([{"role": "user", "content": "Hi"}], [TOOL], **variables), [TOOL]
    )


def test_the_call_format_is_that_of_the_template() -> None:
    form = call_format(dialogue(), enable_thinking=False)
    assert (form.before, form.between) == ('<tool_call>{"name": "', '", "arguments": ')
    assert form.after == "}</tool_call>"
    assert form.free
    assert form.call("look", "{}") == f"<tool_call>{CALL}</tool_call>"


HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
)
TAIL = (
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ["name", "arguments", "tool_call", "a", "some_tool"])
def test_a_tool_may_have_the_name_of_a_part_of_the_format(name: str) -> None:
    one, tool = dialogue(), {**TOOL, "function": {**TOOL["function"], "name": name}}
    prompt = one.chat([{"role": "user", "content": "Hi"}], [tool])
    assert find_call_format(one, prompt, [tool]) == call_format(one)


JSON = "<tool_call>{{ c.function | tojson }}</tool_call>"


def test_another_json_template_is_understood() -> None:
    form = call_format(dialogue(HEAD + JSON + TAIL))
    assert form is not None
    assert form.free


@pytest.mark.parametrize(
    "call",
    [
        "",  # calls are left out
        "<tool_call><f={{ c.function.name }}><p>some value</p></tool_call>",  # no JSON
        "<tool_call>{{ c.function.arguments | tojson }}</tool_call>",  # without a name
        "{{ c.function | tojson }}",  # JSON that the reader does not take for a call
        "{{ raise_exception('no calls') }}",
    ],
)
def test_templates_with_other_calls_have_no_format(call: str) -> None:
    assert call_format(dialogue(HEAD + call + TAIL)) is None


def test_an_answer_with_a_form_of_its_own_is_not_free() -> None:
    template = HEAD.replace("{{ m.content }}", "{% if m.content %}Text: {{ m.content }}{% endif %}")
    form = call_format(dialogue(template + JSON + TAIL))
    assert form is not None
    assert not form.free
