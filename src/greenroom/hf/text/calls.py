"""How a model writes a tool call: found by having its chat template write one.

The template renders an answer that is a call and one that is a mark; what the first has in place
of the mark is the call. So no table of models is needed, and a template that writes calls in
another way than as one JSON object of arguments is found out.
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

# Words that no template writes by itself: a tool may be called "name", which many do write.
MARK, NAME, KEY, VALUE = "\u00a4", "some_tool", "some_key", "some value"
ARGUMENTS = re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{VALUE}"\s*\}}')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of a call: `before`, its name, `between`, its arguments as JSON, `after`.

    free: an answer that does not call is its text alone, without a form of its own
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
    """How a call is written in an answer to this prompt, which was told of `tools`.

    None where the template writes calls otherwise, or where the answer's reader would not find
    such a call in it.
    """
    try:
        called, marked = (_answer(dialogue, tools, call) for call in (True, False))
    except UsageError:
        return None
    found = _between(called, marked)
    return found if found and _is_read(dialogue, prompt, tools, found) else None


def _answer(dialogue: Dialogue, tools: list[dict[str, Any]], call: bool) -> str:
    """A conversation whose last turn calls, or is the mark."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if call else MARK}
    if call:
        function = {"name": NAME, "arguments": {KEY: VALUE}}
        answer["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
    messages = [{"role": "user", "content": "Hello"}, answer]
    return dialogue.decode(dialogue.chat(messages, tools, ends=True), special=True)


def _between(called: str, marked: str) -> CallFormat | None:
    start = _alike(called, marked)
    stop = _alike(called[start:][::-1], marked[start:][::-1])
    call = called[start : len(called) - stop].lstrip()
    arguments = ARGUMENTS.search(call)
    at = call.find(NAME)
    if arguments is None or not 0 <= at < arguments.start():
        return None
    between = call[at + len(NAME) : arguments.start()]
    free = marked[start : len(marked) - stop] == MARK
    return CallFormat(call[:at], between, call[arguments.end() :], free)


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(takewhile(bool, (a == b for a, b in zip(one, other, strict=False))))


def _is_read(
    dialogue: Dialogue,
    prompt: Sequence[int],
    tools: list[dict[str, Any]],
    found: CallFormat,
) -> bool:
    name = tools[0]["function"]["name"]
    speaker = dialogue.reply_parser(prompt, tools)
    said: list[ReplyPart] = []
    text = found.call(name, "{}")
    for token in dialogue.tokenizer(text, add_special_tokens=False)["input_ids"]:
        said += speaker.feed(token)
    said += speaker.end()
    calls = [part.call for part in said if part.call]
    others = [part for part in said if not part.call and (part.text + part.reasoning).strip()]
    if others or len(calls) != 1 or calls[0].name != name:
        return False
    try:
        return bool(parse(calls[0].arguments) == {})
    except Malformed:
        return False
