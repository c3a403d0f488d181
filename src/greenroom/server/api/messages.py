"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, model_validator

from greenroom.hf.text.dialogue import Dialogue
from greenroom.json_file import Malformed, parse
from greenroom.server.api.shared.calls import call_grammar
from greenroom.server.api.shared.conversation import call, check_tools, prompt_of, thinking
from greenroom.server.api.shared.formats import json_grammar
from greenroom.server.engine.requests import Sampling
from greenroom.server.engine.tokens.reader import Delta, End
from greenroom.server.http.answers import Answers, Job
from greenroom.server.http.endpoints import route
from greenroom.server.http.errors import ANTHROPIC_PATH, ApiError
from greenroom.server.http.params import (
    CallId,
    Choice,
    Name,
    Share,
    Strict,
    Text,
    Tokens,
    by_type,
    tag,
    tool_told,
)
from greenroom.server.http.routes import body_of, described, new_id, served_of
from greenroom.server.http.service import Service
from greenroom.server.http.streams import event

EFFORTS = Literal["low", "medium", "high", "xhigh", "max"]
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CacheControl(Strict):
    """A hint that is followed anyway: what requests begin with alike is kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")],
    by_type(),
]
Blocks = Annotated[
    list[Block],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(lambda it: [{"type": "text", "text": it}] if isinstance(it, str) else it),
]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Blocks

    @model_validator(mode="after")
    def _fits(self) -> Turn:
        mine = {"assistant": {"thinking", "tool_use"}, "user": {"tool_result"}}
        for block in self.content:
            if block.type != "text" and block.type not in mine[self.role]:
                raise ValueError(f"{block.type} blocks do not belong to the role {self.role}")
        return self

    def told(self) -> list[dict[str, Any]]:
        """As chat templates take it: results of tools are messages of their own."""
        found: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content or ""}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            call(block.name, block.input, block.id)
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        if texts or thoughts or calls:
            said: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
            said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
            said |= {"tool_calls": calls} if calls else {}
            found.append(said)
        return found


class AnthropicTool(Strict):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None

    def told(self) -> dict[str, Any]:
        return tool_told(self.name, self.description, self.input_schema)


class ToolChoice(Strict):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice.name belongs to the type tool")
        return self

    @property
    def choice(self) -> Choice:
        if self.type == "tool":
            return Choice("named", self.name)
        return Choice("required" if self.type == "any" else self.type)


class Thinking(Strict):
    """Budgets for thinking are not kept, so they are not taken."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized"] | None = None


class Format(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: EFFORTS | None = None
    format: Format | None = None


class Metadata(Strict):
    user_id: str | None = None


class CountRequest(Strict):
    """What a prompt is made of."""

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    def prompt(self, dialogue: Dialogue) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        """(its tokens, the tools). ApiError where this model cannot be told."""
        if self._choice.forced and not self.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        messages = [told for turn in self.messages for told in turn.told()]
        if any(told["role"] == "tool" or "tool_calls" in told for told in messages):
            check_tools(dialogue, "tool_use and tool_result blocks")
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        resume = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        config = self.output_config or OutputConfig()
        options = thinking(dialogue, config.effort, "output_config.effort")
        if self.thinking and self.thinking.type == "disabled":
            options |= thinking(dialogue, "none", "thinking")
        form = "output_config.format" if config.format else None
        return prompt_of(dialogue, messages, self.tools, self._choice, options, form, resume)

    def ids(self, dialogue: Dialogue) -> tuple[int, ...]:
        return self.prompt(dialogue)[0]

    @property
    def _choice(self) -> Choice:
        return self.tool_choice.choice if self.tool_choice else Choice()


class MessagesRequest(CountRequest):
    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]
        | None
    ) = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    diagnostics: None = None
    inference_geo: None = None

    def job(self, dialogue: Dialogue) -> Job:
        one = self.tool_choice is not None and bool(self.tool_choice.disable_parallel_tool_use)
        ids, tools = self.prompt(dialogue)
        return Job(
            prompts=(ids,),
            sampling=Sampling(self.temperature, self.top_p, self.top_k),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences or ()),
            grammar=self._grammar(dialogue, ids, tools),
            tools=tools or None,
            one_call=one,
        )

    def _grammar(
        self, dialogue: Dialogue, ids: tuple[int, ...], tools: list[dict[str, Any]]
    ) -> str | None:
        if self.output_config and self.output_config.format:
            return json_grammar(self.output_config.format.schema_, "output_config.format.schema")
        strict = {tool.name for tool in self.tools or () if tool.strict}
        return call_grammar(dialogue, ids, tools, self._choice, strict) if tools else None


BODIES = (MessagesRequest, CountRequest)


def router(service: Service) -> APIRouter:
    routes = route(service, "/v1/messages", MessagesRequest, Shown, "create")

    @routes.post("/v1/messages/count_tokens", openapi_extra=described(CountRequest))
    async def count(request: Request) -> dict[str, int]:
        body = await body_of(request, service, CountRequest)
        return {"input_tokens": len(await service.prepare(body.ids, served_of(request)))}

    return routes


def block_of(delta: Delta) -> dict[str, Any]:
    """The content block that a delta belongs to, still empty; {} where it says nothing."""
    if delta.call:
        name = delta.call.name
        return {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}}
    if delta.reasoning:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""} if delta.text else {}


def _input(arguments: str) -> dict[str, Any]:
    """Of a call that the model wrote, which need not be an object."""
    try:
        found = parse(arguments, unique=False)
    except Malformed:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


class Shown:
    """An answer in the form of messages."""

    def __init__(self, service: Service, body: MessagesRequest, answers: Answers) -> None:
        self._answers = answers
        self._message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answers.prompt_tokens, "output_tokens": 0},
        }

    async def whole(self) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        async for _, said in self._answers:
            if isinstance(said, End):
                ended = {**self._ended(said), "usage": self._usage(said)}
                return {**self._message, "content": blocks, **ended}
            empty = block_of(said)
            if not empty:
                continue
            if said.call:
                blocks.append({**empty, "input": _input(said.call.arguments)})
                continue
            if not blocks or blocks[-1]["type"] != empty["type"]:
                blocks.append(empty)
            blocks[-1][empty["type"]] += said.text or said.reasoning
        raise ApiError(500, "the engine gave no end")

    async def events(self) -> AsyncIterator[bytes]:
        yield _event({"type": "message_start", "message": self._message})
        index, kind = -1, None
        async for _, said in self._answers:
            empty = {} if isinstance(said, End) else block_of(said)
            if kind and (isinstance(said, End) or (empty and (said.call or empty["type"] != kind))):
                yield _event({"type": "content_block_stop", "index": index})
                kind = None
            if isinstance(said, End):
                delta = self._ended(said)
                yield _event({"type": "message_delta", "delta": delta, "usage": self._usage(said)})
                continue
            if not empty:
                continue
            if kind is None:
                index, kind = index + 1, empty["type"]
                start = {"type": "content_block_start", "index": index, "content_block": empty}
                yield _event(start)
            yield _event({"type": "content_block_delta", "index": index, "delta": _delta(said)})
        yield _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body(ANTHROPIC_PATH, self._answers.request_id), "error")

    def _ended(self, end: End) -> dict[str, Any]:
        reason = "stop_sequence" if end.stop is not None else REASONS[end.reason]
        return {"stop_reason": reason, "stop_sequence": end.stop}

    def _usage(self, end: End) -> dict[str, Any]:
        reused = end.finished.reused_tokens
        return {
            "input_tokens": self._answers.prompt_tokens - reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": end.finished.new_tokens,
        }


def _delta(said: Delta) -> dict[str, Any]:
    if said.call:
        return {"type": "input_json_delta", "partial_json": json.dumps(_input(said.call.arguments))}
    if said.reasoning:
        return {"type": "thinking_delta", "thinking": said.reasoning}
    return {"type": "text_delta", "text": said.text}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
