"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from greenroom.hf.text.dialogue import Dialogue, ToolCall
from greenroom.server.api.shared.chunks import ChunkBuilder
from greenroom.server.api.shared.conversation import (
    JsonForm,
    arguments_of,
    call,
    chat_job,
    thinking,
)
from greenroom.server.api.shared.pictures import Content, ContentValidator
from greenroom.server.api.shared.usage import logprobs
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd
from greenroom.server.http.answers import Job
from greenroom.server.http.endpoints import route
from greenroom.server.http.params import (
    CompletionParams,
    ConversationParams,
    Function,
    FunctionType,
    Name,
    StrictModel,
    Tokens,
    ToolChoice,
    Tools,
    Turns,
    tool_choice_validator,
)
from greenroom.server.http.route_helpers import new_id
from greenroom.server.http.service import Service

CONTENT = ContentValidator(("text",), "image_url", nested=True)
ChatContent = Annotated[Content, PlainValidator(CONTENT), WithJsonSchema(CONTENT.schema())]
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class CalledFunction(StrictModel):
    name: Name
    arguments: str


class PastToolCall(StrictModel):
    """A tool call in an earlier chat message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class Message(StrictModel):
    """One message of a chat completion's request.

    A client may send an answer that it got from this API back unchanged, as a message of the
    assistant.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ChatContent | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(
                "content is missing: only an assistant message with tool_calls may omit it"
            )
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(
                f"a message of the role {self.role} must not have tool_calls or reasoning_content"
            )
        if isinstance(self.content, tuple) and self.role != "user":
            raise ValueError(f"a message of the role {self.role} must not have pictures")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError(
                "a message of the role tool needs a tool_call_id; other messages must not have one"
            )
        return self

    def template_message(self, where: str) -> dict[str, Any]:
        """Return a chat message in the form that chat templates take.

        `where` is the path of the message in the request, for error messages.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                call(
                    past.function.name,
                    arguments_of(past.function.arguments, f"{where}.tool_calls.{i}"),
                    past.id,
                )
                for i, past in enumerate(self.tool_calls)
            ]
        return message


class JsonSchema(StrictModel):
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "response_format needs json_schema if its type is json_schema, else must omit it"
            )
        return self

    def form(self) -> JsonForm | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return JsonForm("response_format", "response_format.json_schema.schema", schema)


class Tool(FunctionType):
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedTool(FunctionType):
    """A function's name in the form of OpenAI's chat completions."""

    function: FunctionName


class ChatRequest(CompletionParams, ConversationParams):
    messages: Turns[Message]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    tools: Tools[Tool] | None = None
    tool_choice: Annotated[ToolChoice, tool_choice_validator(NamedTool)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: EFFORTS | None = None
    # Supported only with their neutral values:
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same: send only one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def job(self, dialogue: Dialogue) -> Job:
        """Convert a chat completion request to a Job: prompt and settings for the engine.

        ApiError if the model's chat template does not support the request.
        """
        return chat_job(
            dialogue,
            [one.template_message(f"messages.{i}") for i, one in enumerate(self.messages)],
            tools=[tool.function for tool in self.tools or ()],
            choice=self.tool_choice,
            form=self.response_format.form() if self.response_format else None,
            options=thinking(dialogue, self.reasoning_effort, "reasoning_effort"),
            calls="messages of the role tool",
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stops=self.stop or (),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            one_call=self.parallel_tool_calls is False,
        )


BODIES = (ChatRequest,)


def router(service: Service) -> APIRouter:
    return route(service, "/v1/chat/completions", ChatRequest, ChatBuilder)


class ChatBuilder(ChunkBuilder):
    """Builds responses of OpenAI's chat completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    content_key = "delta"

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        for index in range(self._answers.count):
            self._choices.append({
                "index": index,
                "message": {"role": "assistant", "content": None, "refusal": None},
                "logprobs": {"content": []} if self._body.logprobs else None,
            })  # fmt: skip
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, part in self._answers:
            if isinstance(part, AnswerEnd):
                message = self._choices[index]["message"]
                if "tool_calls" not in message:
                    message["content"] = message["content"] or ""
                yield self._chunk(index, {}, reason=self._ended(index, part))
            else:
                yield self._add(index, part)

    def _add(self, index: int, part: AnswerDelta) -> dict[str, Any]:
        """Make the chunk of a choice's next part, and add the part to the choice."""
        choice = self._choices[index]
        message, shown = choice["message"], None
        texts = {"content": part.text, "reasoning_content": part.reasoning}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        for name, text in delta.items():
            message[name] = (message.get(name) or "") + text
        if part.call:
            new, calls = _call(part.call), message.setdefault("tool_calls", [])
            delta["tool_calls"] = [{"index": len(calls), **new}]
            calls.append(new)
        if self._body.logprobs:
            shown = {"content": logprobs(self._answers.dialogue, part.tokens)}
            choice["logprobs"]["content"] += shown["content"]
        return self._chunk(index, delta, shown)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call_"), "type": "function", "function": function}
