"""Learn the text format of a model's tool calls from its chat template.

The template renders one conversation that ends in a tool call and one that ends in a marker text.
The part in which the two results differ is the text of the call. So no table of models is needed.
Templates that do not write a call's arguments as one JSON object are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from greenroom.errors import UsageError
from greenroom.hf.text.dialogue import Dialogue, ReplyPart
from greenroom.json_file import Malformed, parse

# Names that no template contains: many contain "name", which a tool may be called.
MARK, NAME, KEY, VALUE = "\u00a4", "some_tool", "some_key", "some value"
ARGUMENTS = re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{VALUE}"\s*\}}')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a model's tool calls: the texts around a tool's name and arguments.

    A call is written as `before`, the tool's name, `between`, the arguments as JSON, and `after`.

    free: True if the template writes an answer without a tool call exactly as its text
    """

    before: str
    between: str
    after: str
    free: bool

    def call(self, name: str, arguments: str) -> str:
        return f"{self.before}{name}{self.between}{arguments}{self.after}"


def find_call_format(
    dialogue: Dialogue, prompt: Sequence[int], tools: list[dict[str, Any]]
) -> CallFormat | None:
    """Find how a model writes calls of the tools that its prompt lists.

    `prompt` has the token ids of a conversation, and `tools` are its tools. The result is None if
    the chat template does not write a call as a name and one JSON object, or if the reply parser
    does not recognise a call in this format.
    """
    try:
        called, marked = (_render(dialogue, tools, call) for call in (True, False))
    except UsageError:
        return None
    call_format = _compare_answers(called, marked)
    if call_format is None or not _is_recognised(dialogue, prompt, tools, call_format):
        return None
    return call_format


def _render(dialogue: Dialogue, tools: list[dict[str, Any]], call: bool) -> str:
    """Render a conversation whose last message is a tool call, or the text MARK."""
    message: dict[str, Any] = {"role": "assistant", "content": "" if call else MARK}
    if call:
        function = {"name": NAME, "arguments": {KEY: VALUE}}
        message["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
    messages = [{"role": "user", "content": "Hello"}, message]
    return dialogue.decode(dialogue.chat(messages, tools, ends=True), special=True)


def _compare_answers(called: str, marked: str) -> CallFormat | None:
    start = _common_length(called, marked)
    stop = _common_length(called[start:][::-1], marked[start:][::-1])
    call = called[start : len(called) - stop].lstrip()
    arguments = ARGUMENTS.search(call)
    at = call.find(NAME)
    if arguments is None or not 0 <= at < arguments.start():
        return None
    between = call[at + len(NAME) : arguments.start()]
    free = marked[start : len(marked) - stop] == MARK
    return CallFormat(call[:at], between, call[arguments.end() :], free)


def _common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(takewhile(bool, (a == b for a, b in zip(one, other, strict=False))))


def _is_recognised(
    dialogue: Dialogue,
    prompt: Sequence[int],
    tools: list[dict[str, Any]],
    call_format: CallFormat,
) -> bool:
    name = tools[0]["function"]["name"]
    parser = dialogue.reply_parser(prompt, tools)
    parts: list[ReplyPart] = []
    text = call_format.call(name, "{}")
    for token in dialogue.tokenizer(text, add_special_tokens=False)["input_ids"]:
        parts += parser.feed(token)
    parts += parser.end()
    calls = [part.call for part in parts if part.call]
    others = [part for part in parts if not part.call and (part.text + part.reasoning).strip()]
    if others or len(calls) != 1 or calls[0].name != name:
        return False
    try:
        return bool(parse(calls[0].arguments) == {})
    except Malformed:
        return False
