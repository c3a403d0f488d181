"""Grammars of required tool calls and of tools with strict schemas."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.shared.calls import tool_call_grammar
from greenroom.server.engine.tokens.grammar import Grammars
from greenroom.server.http.params import ToolChoice
from tests.server.conftest import NAME, Serve, fake_engine, reasoning_engine, thinker_tokenizer

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
GO: dict[str, Any] = {
    "type": "object", "properties": {"steps": {"type": "integer"}}, "required": ["steps"],
}  # fmt: skip
QUESTION: Any = [{"role": "user", "content": "Where?"}]


def function_tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [function_tool("look", LOOK), function_tool("go", GO)]
LOOK_CALL = '<tool_call>{"name": "look", "arguments": {"place":"here"}}</tool_call>'
GO_CALL = '<tool_call>{"name": "go", "arguments": {"steps":3}}</tool_call>'
INVALID_CALL = '<tool_call>{"name": "look", "arguments": {"steps":3}}</tool_call>'
UNKNOWN_CALL = '<tool_call>{"name": "jump", "arguments": {}}</tool_call>'


def takes(choice: ToolChoice, answer: str, strict: tuple[str, ...] = ()) -> bool:
    """May the model give this answer, and end there?"""
    tokenizer = thinker_tokenizer()
    dialogue = Dialogue(tokenizer, "qwen3_moe")
    prompt = dialogue.chat(QUESTION, TOOLS, enable_thinking=False)
    grammar = tool_call_grammar(dialogue, prompt, TOOLS, choice, strict)
    assert grammar is not None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    grammar_state = Grammars(tokenizer, len(tokenizer), (end,))(grammar)
    for token in tokenizer(answer, add_special_tokens=False)["input_ids"]:
        if not grammar_state.allowed(len(tokenizer))[token]:
            return False
        grammar_state.take(token)
    return bool(grammar_state.allowed(len(tokenizer))[end])


@pytest.mark.parametrize(
    ("answer", "required", "named", "strict"),
    [
        (LOOK_CALL, True, False, True),
        (GO_CALL, True, True, True),
        (INVALID_CALL, False, False, False),
        (UNKNOWN_CALL, False, False, False),
        ("I do not know.", False, False, True),
        (f"I look.\n{LOOK_CALL}", False, False, True),
        (f"{LOOK_CALL}\n{GO_CALL}", False, False, True),
        ('<tool_call>{"name": "go", "arguments": {"far":1}}</tool_call>', False, False, True),
    ],
)
def test_grammars_accept_valid_calls_only(
    answer: str, required: bool, named: bool, strict: bool
) -> None:
    """`strict`: the model chooses, and of the tools look alone keeps to its schema."""
    assert takes(ToolChoice("required"), answer) == required
    assert takes(ToolChoice("named", "go"), answer) == named
    assert takes(ToolChoice(), answer, ("look",)) == strict


def test_without_required_or_strict_tools_there_is_no_grammar() -> None:
    dialogue = Dialogue(thinker_tokenizer(), "qwen3_moe")
    assert tool_call_grammar(dialogue, [5], TOOLS, ToolChoice(), ()) is None


def test_required_calls_in_openais_chat(serve: Serve) -> None:
    running = serve(reasoning_engine(GO_CALL))
    api = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0).chat.completions
    named: Any = {"type": "function", "function": {"name": "go"}}
    for choice in ("required", named):
        response = api.create(model=NAME, messages=QUESTION, tools=TOOLS, tool_choice=choice)
        assert response.choices[0].finish_reason == "tool_calls"
        assert response.choices[0].message.tool_calls[0].function.name == "go"
    first, second = (ticket.request for ticket in running.engine.tickets)
    assert "look" in first.grammar
    assert "look" not in second.grammar
    decode = running.engine.tokenizer.decode
    assert decode(first.ids).endswith("<think>\n\n</think>\n\n")  # nothing but a call can be said
    tool: Any = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    api.create(model=NAME, messages=QUESTION, tools=[tool])
    assert '"place"' in running.engine.tickets[2].request.grammar
    assert not decode(running.engine.tickets[2].request.ids).endswith("</think>\n\n")


def test_required_calls_in_openais_responses(serve: Serve) -> None:
    running = serve(reasoning_engine(GO_CALL))
    api = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0).responses
    tools: Any = [{"type": "function", "name": "go", "parameters": GO, "strict": True}]
    choices: list[Any] = ["required", {"type": "function", "name": "go"}, "auto"]
    for choice in choices:
        response = api.create(model=NAME, input="Where?", tools=tools, tool_choice=choice)
        assert json.loads(response.output[0].arguments) == {"steps": 3}  # type: ignore[union-attr]
    assert all('"steps"' in ticket.request.grammar for ticket in running.engine.tickets)


def test_required_calls_in_anthropics_messages(serve: Serve) -> None:
    running = serve(reasoning_engine(GO_CALL))
    api = anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0).messages
    tools: Any = [{"name": "go", "input_schema": GO}, {"name": "look", "input_schema": LOOK}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "go"}):
        response = api.create(
            model=NAME, max_tokens=100, messages=QUESTION, tools=tools, tool_choice=choice
        )
        assert response.stop_reason == "tool_use"
        assert response.content[0].input == {"steps": 3}  # type: ignore[union-attr]
    first, second = (ticket.request.grammar for ticket in running.engine.tickets)
    assert "look" in first
    assert "look" not in second


def test_unsupported_tool_choices_are_errors(serve: Serve) -> None:
    running = serve(reasoning_engine(GO_CALL))
    api = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0).chat.completions
    unknown: Any = {"type": "function", "function": {"name": "jump"}}
    with pytest.raises(openai.BadRequestError, match="tools has no function named 'jump'"):
        api.create(model=NAME, messages=QUESTION, tools=TOOLS, tool_choice=unknown)
    odd: Any = [function_tool("go", {"type": "object", "properties": {"n": {"type": "color"}}})]
    with pytest.raises(openai.BadRequestError, match="parameters of go is a schema that is not"):
        api.create(model=NAME, messages=QUESTION, tools=odd, tool_choice="required")
    plain = serve(fake_engine("Hi"))
    api = openai.OpenAI(base_url=plain.url + "/v1", api_key="x", max_retries=0).chat.completions
    with pytest.raises(
        openai.BadRequestError, match="tools: this model's chat template has no place for tools"
    ):
        api.create(model=NAME, messages=QUESTION, tools=TOOLS, tool_choice="required")


def test_unparseable_arguments_are_passed_as_text() -> None:
    from greenroom.server.api.shared.conversation import call_arguments

    assert call_arguments('{"a": 1}') == {"a": 1}
    for text in ("[" * 200_000, '{"a": ', "[1]"):
        assert call_arguments(text) == {"arguments": [1] if text == "[1]" else text}
