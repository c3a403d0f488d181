"""Tool calls that must come, or must keep to their schema: the grammar of such an answer.

Where a call is required the answer is one call and nothing else. Where the model chooses, and
tools are strict, it is free until it begins a call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from greenroom.hf.text.calls import CallFormat, find_call_format
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.shared.formats import STRICT, check_schema, json_grammar
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import ToolChoice

Tools = list[dict[str, Any]]
ANY = {"type": "object"}


def tool_call_grammar(
    dialogue: Dialogue,
    prompt: Sequence[int],
    tools: Tools,
    choice: ToolChoice,
    strict: Collection[str],
) -> str | None:
    """The grammar of an answer to `prompt`, or None where it is free.

    `strict` are the tools that keep to their schema also where the model chooses. ApiError where
    this model's template writes calls otherwise, or a schema is not supported.
    """
    if not choice.forced and not strict:
        return None
    named = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not named:
        raise ApiError(400, f"tool_choice: there is no tool {choice.name!r}", param="tool_choice")
    form = find_call_format(dialogue, prompt, named)
    if form is None or not (choice.forced or form.free):
        param = "tool_choice" if choice.forced else "tools"
        what = "tool_choice that asks for a call" if choice.forced else "strict of tools"
        raise ApiError(400, f"{what} is not supported by this model's chat template", param=param,
                       code="unsupported_parameter")  # fmt: skip
    return _grammar(dialogue, form, named, None if choice.forced else strict)


def _grammar(
    dialogue: Dialogue, form: CallFormat, tools: Tools, strict: Collection[str] | None
) -> str:
    """One call, or, of `strict` tools, text with calls in it."""
    schemas = [tool["function"]["parameters"] for tool in tools]
    check_schema(schemas, "tools")  # all of them together become one grammar
    special = _special(dialogue)
    calls = [f"call_{i}" for i in range(len(tools))]
    if strict is None:
        lines = [f"start: {_pieces(form.before, special)} ({' | '.join(calls)})"]
    else:
        lines = _free(form.before, special, calls)
    for call, tool in zip(calls, tools, strict=True):
        function = tool["function"]
        name, schema = function["name"], function["parameters"]
        if strict is not None and name not in strict:
            schema = ANY
        json_grammar(schema, f"tools: parameters of {name}")  # is it one that can be kept?
        schema = {**schema, "x-guidance": STRICT}
        lines.append(
            f"{call}: {_pieces(name + form.between, special)} %json {json.dumps(schema)}"
            f" {_pieces(form.after, special)}"
        )
    return "\n".join(["%llguidance {}", *lines])


def _free(before: str, special: dict[str, int], calls: list[str]) -> list[str]:
    """Text, with calls in it. A call begins with a special token, or with a text."""
    first = next((token for token in special if before.startswith(token)), None)
    rest = _pieces(before.removeprefix(first or before), special)
    lines = [
        f"start: (begun {rest} ({' | '.join(calls)}))* TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    if first is None:
        return [*lines, f"begun[lazy]: TEXT {json.dumps(before)}"]
    return [*lines, f"begun: TEXT {_token(special[first])}"]


def _special(dialogue: Dialogue) -> dict[str, int]:
    """Tokens that no text can spell."""
    decoder = dialogue.tokenizer.added_tokens_decoder
    return {token.content: number for number, token in decoder.items() if token.special}


def _token(number: int) -> str:
    return f"<[{number}]>"


def _pieces(text: str, special: dict[str, int]) -> str:
    """A text as a grammar: strings, and special tokens by number."""
    found = []
    while text:
        at, token = min(
            ((text.find(one), one) for one in special if one in text), default=(len(text), "")
        )
        found += [json.dumps(text[:at])] if at else []
        found += [_token(special[token])] if token else []
        text = text[at + len(token) :]
    return " ".join(found)
