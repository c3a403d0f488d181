"""Grammars of required or strict tool calls.

If a call is required, the answer is exactly one call. If the model chooses, and tools are strict,
the text is free until a call begins.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from greenroom.hf.text.calls import CallFormat, find_call_format
from greenroom.hf.text.dialogue import Dialogue
from greenroom.json_file import show_value
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
    """Make the llguidance grammar of an answer's tool calls; None if no grammar is needed.

    `strict` has the names of tools whose calls follow their schema even if no call is required.
    ApiError if no tool has the required name, the call format of the model's chat template is not
    supported, or a schema is not supported.
    """
    if not choice.forced and not strict:
        return None
    named = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not named:
        raise ApiError(
            400,
            f"tool_choice: tools has no function named {show_value(choice.name)}",
            param="tool_choice",
        )
    form = find_call_format(dialogue, prompt, named)
    if form is None or not (choice.forced or form.free):
        param = "tool_choice" if choice.forced else "tools"
        what = "tool_choice that requires a call" if choice.forced else "strict in tools"
        raise ApiError(400, f"{what} is not supported by this model's chat template", param=param,
                       code="unsupported_parameter")  # fmt: skip
    return _grammar(dialogue, form, named, None if choice.forced else strict)


def _grammar(
    dialogue: Dialogue, form: CallFormat, tools: Tools, strict: Collection[str] | None
) -> str:
    """Make the grammar of one tool call, or, with `strict`, of text with calls."""
    schemas = [tool["function"]["parameters"] for tool in tools]
    check_schema(schemas, "tools")  # together they become one grammar
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
        json_grammar(
            schema, f"tools: parameters of {name}"
        )  # raises ApiError if it is not supported
        schema = {**schema, "x-guidance": STRICT}
        lines.append(
            f"{call}: {_pieces(name + form.between, special)} %json {json.dumps(schema)}"
            f" {_pieces(form.after, special)}"
        )
    return "\n".join(["%llguidance {}", *lines])


def _free(before: str, special: dict[str, int], calls: list[str]) -> list[str]:
    """Make the grammar rules of text with tool calls.

    A call begins with a special token or a text.
    """
    first = next((token for token in special if before.startswith(token)), None)
    after_token = _pieces(before.removeprefix(first or before), special)
    lines = [
        f"start: (begun {after_token} ({' | '.join(calls)}))* TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    if first is None:
        return [*lines, f"begun[lazy]: TEXT {json.dumps(before)}"]
    return [*lines, f"begun: TEXT {_token(special[first])}"]


def _special(dialogue: Dialogue) -> dict[str, int]:
    """Return the tokenizer's special tokens, which text cannot contain."""
    decoder = dialogue.tokenizer.added_tokens_decoder
    return {token.content: number for number, token in decoder.items() if token.special}


def _token(number: int) -> str:
    return f"<[{number}]>"


def _pieces(text: str, special: dict[str, int]) -> str:
    """Write a text as llguidance grammar: strings, and special tokens by number."""
    pieces = []
    while text:
        at, token = min(
            ((text.find(one), one) for one in special if one in text), default=(len(text), "")
        )
        pieces += [json.dumps(text[:at])] if at else []
        pieces += [_token(special[token])] if token else []
        text = text[at + len(token) :]
    return " ".join(pieces)
