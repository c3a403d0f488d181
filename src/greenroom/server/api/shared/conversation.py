"""A conversation as chat templates take it, and what an API may ask of the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import Choice

Messages = list[dict[str, Any]]


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """A tool call's arguments, which templates want as an object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{param} is not a JSON object", param=param)
    return found


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    """A call that the model has made before."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def check_tools(dialogue: Dialogue, param: str = "tools") -> None:
    """ApiError where a model's template knows no tools, or its calls cannot be told from text."""
    if not dialogue.knows_tools:
        raise ApiError(400, f"{param} is not supported by this model's chat template", param=param,
                       code="unsupported_parameter")  # fmt: skip


def thinking(dialogue: Dialogue, effort: str | None, param: str) -> dict[str, Any]:
    """What the template is told of how much to reason. ApiError where it cannot be told.

    "none" switches reasoning off; other efforts are the template's own words.
    """
    if effort is None or (effort == "none" and not dialogue.reasons):
        return {}
    if effort == "none" and dialogue.reads("enable_thinking"):
        return {"enable_thinking": False}
    if effort != "none" and dialogue.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    raise ApiError(400, f"{param} {effort!r} is not supported by this model's chat template",
                   param=param, code="unsupported_value")  # fmt: skip


def prompt_of(
    dialogue: Dialogue,
    messages: Messages,
    tools: Sequence[Any] | None,
    choice: Choice,
    options: dict[str, Any],
    form: str | None,
    resume: bool = False,
) -> tuple[tuple[int, ...], Messages]:
    """(a prompt's tokens, the tools that its answer may call, as templates take them).

    `form` is the parameter that binds the answer to a grammar, if one does. ApiError where this
    model cannot be asked so.
    """
    usable = [tool.told() for tool in tools or ()] if choice.kind != "none" else []
    if usable:
        check_tools(dialogue)
        if form is not None:
            raise ApiError(400, "tools cannot be called in JSON mode: send one of tools and"
                           f" {form}", param=form)  # fmt: skip
    if form is not None or choice.forced:  # it can say nothing else
        options = options or _without_thinking(dialogue)
    return tuple(dialogue.chat(messages, usable, resume, **options)), usable


def _without_thinking(dialogue: Dialogue) -> dict[str, Any]:
    """What the template is told where an answer has no room for reasoning."""
    return {"enable_thinking": False} if dialogue.reads("enable_thinking") else {}
