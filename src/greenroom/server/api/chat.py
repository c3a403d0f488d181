"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from greenroom.hf.text.dialogue import Dialogue, ToolCall
from greenroom.server.api.shared.calls import call_grammar
from greenroom.server.api.shared.chunks import Chunks
from greenroom.server.api.shared.conversation import (
    arguments_of,
    call,
    check_tools,
    prompt_of,
    thinking,
)
from greenroom.server.api.shared.formats import json_grammar
from greenroom.server.api.shared.usage import logprobs
from greenroom.server.engine.tokens.reader import Delta, End
from greenroom.server.http.answers import Job
from greenroom.server.http.endpoints import route
from greenroom.server.http.params import (
    Choice,
    Name,
    OpenAI,
    Sampled,
    Stop,
    StreamOptions,
    Strict,
    Text,
    Tokens,
    ToolList,
    choice_of,
    choice_schema,
)
from greenroom.server.http.routes import new_id
from greenroom.server.http.service import Service

NAMED = ("function", "name")
ToolChoice = Annotated[
    Choice, PlainValidator(choice_of(NAMED)), WithJsonSchema(choice_schema(NAMED))
]
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class CalledFunction(Strict):
    name: Name
    arguments: str


class MadeCall(Strict):
    """A tool call in the history."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """One turn. What models have said before may come back as it was sent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(f"a {self.role} message has no tool_calls and no reasoning_content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to a tool message, and every one has it")
        return self

    def told(self, where: str) -> dict[str, Any]:
        """As chat templates take it."""
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [
                call(
                    made.function.name,
                    arguments_of(made.function.arguments, f"{where}.tool_calls.{i}"),
                    made.id,
                )
                for i, made in enumerate(self.tool_calls)
            ]
        return found


class JsonSchema(Strict):
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format.json_schema belongs to the type json_schema")
        return self

    def grammar(self) -> str | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return json_grammar(schema, "response_format.json_schema.schema")


class ChatRequest(OpenAI, Sampled):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: EFFORTS | None = None
    prompt_cache_key: str | None = None
    # Of these, only what they are without being sent:
    store: Literal[False] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    web_search_options: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.tool_choice and self.tool_choice.kind != "none" and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self

    def job(self, dialogue: Dialogue) -> Job:
        """What the engine is asked. ApiError where this model cannot do it."""
        grammar = self.response_format.grammar() if self.response_format else None
        choice = self.tool_choice or Choice()
        if any(message.role == "tool" or message.tool_calls for message in self.messages):
            check_tools(dialogue, "messages of the role tool")
        messages = [one.told(f"messages.{i}") for i, one in enumerate(self.messages)]
        options = thinking(dialogue, self.reasoning_effort, "reasoning_effort")
        form = None if grammar is None else "response_format"
        ids, tools = prompt_of(dialogue, messages, self.tools, choice, options, form)
        if tools:
            strict = {tool.function.name for tool in self.tools or () if tool.function.strict}
            grammar = call_grammar(dialogue, ids, tools, choice, strict)
        return Job(
            prompts=(ids,),
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stops=self.stop or (),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar,
            tools=tools or None,
            one_call=self.parallel_tool_calls is False,
        )


BODIES = (ChatRequest,)


def router(service: Service) -> APIRouter:
    return route(service, "/v1/chat/completions", ChatRequest, Shown)


class Shown(Chunks):
    """Answers in the form of chat completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    async def whole(self) -> dict[str, Any]:
        """One object with all choices."""
        heard = [Heard() for _ in range(self._answers.job.n)]
        reasons = [""] * len(heard)
        async for index, said in self._answers:
            if isinstance(said, End):
                reasons[index] = self._ended(said)
            else:
                heard[index].add(said, self._answers.dialogue)
        choices = [
            {
                "index": index,
                "message": one.message(),
                "logprobs": {"content": one.logprobs} if self._body.logprobs else None,
                "finish_reason": reason,
            }
            for index, (one, reason) in enumerate(zip(heard, reasons, strict=True))
        ]
        return self._object(choices)

    async def events(self) -> AsyncIterator[bytes]:
        """A chunk a delta; the last has the usage where it is wanted."""
        count = self._answers.job.n
        calls = [0] * count
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, said in self._answers:
            if isinstance(said, End):
                yield self._chunk(index, {}, finish_reason=self._ended(said))
                continue
            delta: dict[str, Any] = {}
            if said.text:
                delta["content"] = said.text
            if said.reasoning:
                delta["reasoning_content"] = said.reasoning
            if said.call:
                delta["tool_calls"] = [{"index": calls[index], **_call(said.call)}]
                calls[index] += 1
            shown = None
            if self._body.logprobs:
                shown = {"content": logprobs(self._answers.dialogue, said.tokens)}
            yield self._chunk(index, delta, shown)
        yield self._closing()

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        shown: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._event(
            {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        )


class Heard:
    """One choice, put together from what came."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self.logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta, dialogue: Dialogue) -> None:
        self._text += [delta.text] * bool(delta.text)
        self._reasoning += [delta.reasoning] * bool(delta.reasoning)
        self._calls += [delta.call] if delta.call else []
        if any(token.logprob is not None for token in delta.tokens):
            self.logprobs += logprobs(dialogue, delta.tokens)

    def message(self) -> dict[str, Any]:
        text = "".join(self._text)
        found: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            found["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            found["tool_calls"] = [_call(made) for made in self._calls]
        return found


def _call(made: ToolCall) -> dict[str, Any]:
    function = {"name": made.name, "arguments": made.arguments}
    return {"id": new_id("call_"), "type": "function", "function": function}
