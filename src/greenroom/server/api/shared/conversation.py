"""Conversations in the form of chat templates, and their conversion to prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from greenroom.hf.text.dialogue import Dialogue
from greenroom.json_file import Malformed, parse
from greenroom.server.api.shared.calls import tool_call_grammar
from greenroom.server.api.shared.formats import json_grammar
from greenroom.server.api.shared.pictures import prompt_of
from greenroom.server.http.answers import Job
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import Function, ToolChoice

Messages = list[dict[str, Any]]


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """Parse the JSON text of a tool call's arguments to a dict.

    ApiError, which names the parameter `param`, if the text is not a JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{param} is not a JSON object", param=param)
    return arguments


def call_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    If the model wrote something else, the object has it under the key "arguments".
    """
    try:
        value = parse(arguments, unique=False)
    except Malformed:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Return an earlier tool call of the model in the form that chat templates take."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def check_tools(dialogue: Dialogue, param: str = "tools") -> None:
    """Raise ApiError if the model's chat template or tool-call parser does not support tools."""
    if not dialogue.supports_tools:
        raise ApiError(400, f"{param}: this model's chat template has no place for tools, or"
                       " asks for tool calls in a format that Greenroom cannot read",
                       param=param, code="unsupported_parameter")  # fmt: skip


def thinking(dialogue: Dialogue, effort: str | None, param: str) -> dict[str, Any]:
    """Return the options of a chat template for a reasoning effort.

    The effort "none" switches reasoning off; other efforts are passed to the template. ApiError if
    the template cannot switch reasoning off, or takes no effort.
    """
    if effort is None or (effort == "none" and not dialogue.supports_reasoning):
        return {}
    if effort == "none" and dialogue.template_uses("enable_thinking"):
        return {"enable_thinking": False}
    if effort != "none" and dialogue.template_uses("reasoning_effort"):
        return {"reasoning_effort": effort}
    raise ApiError(400, f"{param} {effort!r}: this model's chat template does not support it",
                   param=param, code="unsupported_value")  # fmt: skip


class JsonForm(NamedTuple):
    """The JSON format that a client requests for an answer: a schema, or any object.

    `param` is the request parameter that selects the format, and `where` the path of the schema in
    the request. Error messages contain both.
    """

    param: str
    where: str
    schema: dict[str, Any] | None


def form_grammar(form: JsonForm | None) -> str | None:
    """Make the grammar of an answer's JSON format; None for text."""
    return None if form is None else json_grammar(form.schema, form.where)


def chat_job(
    dialogue: Dialogue,
    messages: Messages,
    *,
    tools: Sequence[Function] | None,
    choice: ToolChoice | None,
    form: JsonForm | None,
    options: dict[str, Any],
    calls: str,
    resume: bool = False,
    **job: Any,
) -> Job:
    """Convert a conversation to a Job: prompt and settings for the engine.

    ApiError if the model's chat template does not support the conversation.

    tools:   functions that the answer may call, subject to `choice`
    form:    the JSON format of the answer, or None for text
    options: further options of the chat template
    calls:   the API's term for messages that are tool calls or their results, for error messages
    resume:  continue the last message instead of beginning a new one
    job:     values of further fields of the Job
    """
    choice = choice or ToolChoice()
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        check_tools(dialogue, calls)
    usable = [tool.template_tool() for tool in tools or ()] if choice.kind != "none" else []
    grammar = form_grammar(form)
    if usable:
        check_tools(dialogue)
        if form is not None:
            raise ApiError(400, f"tools and {form.param} exclude each other: send one of them",
                           param=form.param)  # fmt: skip
    if (form is not None or choice.forced) and dialogue.template_uses("enable_thinking"):
        options = options or {"enable_thinking": False}  # the grammar leaves no room for reasoning
    ids, pictures = prompt_of(dialogue, messages, usable, resume, options)
    if usable:
        strict = {tool.name for tool in tools or () if tool.strict}
        grammar = tool_call_grammar(dialogue, ids, usable, choice, strict)
    return Job((ids,), grammar=grammar, tools=usable or None, pictures=pictures, **job)
