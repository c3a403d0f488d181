"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.blocks import (
    Blocks,
    CacheControl,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from greenroom.server.api.shared.conversation import (
    JsonForm,
    call,
    call_arguments,
    chat_job,
    thinking,
)
from greenroom.server.api.shared.pictures import join_texts
from greenroom.server.engine.requests import Sampling
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd
from greenroom.server.http.answers import AnswerStream, Job
from greenroom.server.http.endpoints import ResponseBuilder, route
from greenroom.server.http.errors import ANTHROPIC_PATH, ApiError
from greenroom.server.http.params import (
    Function,
    Share,
    StrictModel,
    Text,
    Tokens,
    ToolChoice,
    Tools,
    Turns,
)
from greenroom.server.http.route_helpers import new_id, openapi_body, read_body, record_of
from greenroom.server.http.service import Service
from greenroom.server.http.streams import event

EFFORTS = Literal["low", "medium", "high", "xhigh", "max"]
DEFAULT_EFFORT = "high"  # in Anthropic's API the same as no effort
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Turn(StrictModel):
    """One message; those of the role system are instructions in the middle of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _fits(self) -> Turn:
        mine = {"assistant": {"thinking", "tool_use"}, "user": {"tool_result", "image"}}
        for block in self.content:
            if block.type != "text" and block.type not in mine.get(self.role, ()):
                raise ValueError(f"{block.type} blocks are not allowed in the role {self.role}")
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """Convert one message of Anthropic's API to messages in the form that chat templates take.

        Each tool result becomes a message of its own, before the message with the text.
        """
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content or ""}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        parts = [
            block.text if isinstance(block, TextBlock) else block.part()
            for block in self.content
            if isinstance(block, TextBlock | ImageBlock)
        ]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            call(block.name, block.input, block.id)
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        if parts or thoughts or calls:
            message: dict[str, Any] = {"role": self.role, "content": join_texts(parts)}
            message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
            message |= {"tool_calls": calls} if calls else {}
            messages.append(message)
        return messages


class AnthropicTool(Function):
    parameters: dict[str, Any] = Field(alias="input_schema")
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # a hint: calls are complete when they are sent
    defer_loading: Literal[False] | None = None


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice needs a name if its type is tool, else must not have one")
        return self

    @property
    def choice(self) -> ToolChoice:
        if self.type == "tool":
            return ToolChoice("named", self.name)
        return ToolChoice("required" if self.type == "any" else self.type)


class Thinking(StrictModel):
    """The thinking parameter of Anthropic's API; token budgets of thinking are refused."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized"] | None = None


class AnthropicFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def form(self) -> JsonForm:
        return JsonForm("output_config.format", "output_config.format.schema", self.schema_)


class OutputConfig(StrictModel):
    effort: EFFORTS | None = None
    format: AnthropicFormat | None = None


class AnthropicMetadata(StrictModel):
    user_id: str | None = None


class NeutralEdit(StrictModel):
    """An edit of the context that changes nothing, the only one that is supported."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(StrictModel):
    edits: list[NeutralEdit] | None = None


class CountRequest(StrictModel):
    """A request to Anthropic's API to count a prompt's tokens."""

    model: Annotated[str, Field(max_length=512)]
    messages: Turns[Turn]
    system: Text | None = None
    tools: Tools[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _begins(self) -> Self:
        if self.messages[0].role == "system":
            raise ValueError(
                "messages.0.role must be 'user' or 'assistant': send the first instructions as"
                " system"
            )
        return self

    def job(self, dialogue: Dialogue, **job: Any) -> Job:
        """Convert a request to Anthropic's API to a Job: prompt and settings for the engine.

        `job` has values of further fields of the Job. ApiError if the model's chat template does
        not support the request.
        """
        choice = self.tool_choice.choice if self.tool_choice else ToolChoice()
        if choice.forced and not self.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        messages = [message for turn in self.messages for message in turn.template_messages()]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        config = self.output_config or OutputConfig()
        effort = config.effort
        if effort == DEFAULT_EFFORT and not dialogue.template_uses("reasoning_effort"):
            effort = None
        options = thinking(dialogue, effort, "output_config.effort")
        if self.thinking and self.thinking.type == "disabled":
            options |= thinking(dialogue, "none", "thinking")
        return chat_job(
            dialogue,
            messages,
            tools=self.tools,
            choice=choice,
            form=config.format.form() if config.format else None,
            options=options,
            calls="tool_use and tool_result blocks",
            resume=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            **job,
        )


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
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    diagnostics: None = None
    inference_geo: None = None

    def job(self, dialogue: Dialogue, **job: Any) -> Job:
        return super().job(
            dialogue,
            sampling=Sampling(self.temperature, self.top_p, self.top_k),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences or ()),
            one_call=bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use),
        )


BODIES = (MessagesRequest, CountRequest)


def router(service: Service) -> APIRouter:
    routes = route(service, "/v1/messages", MessagesRequest, MessageBuilder, "create")

    @routes.post("/v1/messages/count_tokens", openapi_extra=openapi_body(CountRequest))
    async def count(request: Request) -> dict[str, int]:
        body = await read_body(request, service, CountRequest)
        job = await service.prepare(body.job, record_of(request))
        return {"input_tokens": len(job.prompts[0])}

    return routes


def block_of(delta: AnswerDelta) -> dict[str, Any]:
    """Return the empty content block, in Anthropic's API, for a part of an answer.

    The result is {} if the part has no text, reasoning or tool call.
    """
    if delta.call:
        name = delta.call.name
        return {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}}
    if delta.reasoning:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""} if delta.text else {}


class MessageBuilder(ResponseBuilder):
    """Builds responses of Anthropic's messages API."""

    def __init__(self, service: Service, body: MessagesRequest, answers: AnswerStream) -> None:
        super().__init__(service, body, answers)
        self._message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answers.prompt_tokens, "output_tokens": 0},
        }

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message}
        blocks: list[dict[str, Any]] = self._message["content"]
        kind = None  # of the open block
        async for _, part in self._answers:
            empty = {} if isinstance(part, AnswerEnd) else block_of(part)
            if kind and (
                isinstance(part, AnswerEnd) or (empty and (part.call or empty["type"] != kind))
            ):
                yield {"type": "content_block_stop", "index": len(blocks) - 1}
                kind = None
            if isinstance(part, AnswerEnd):
                reason = "stop_sequence" if part.stop is not None else REASONS[part.reason]
                ended = {"stop_reason": reason, "stop_sequence": part.stop}
                self._message |= {**ended, "usage": self._usage(part)}
                yield {"type": "message_delta", "delta": ended, "usage": self._usage(part)}
                continue
            if not empty:
                continue
            if kind is None:
                kind, at = empty["type"], len(blocks)
                blocks.append(empty)
                yield {"type": "content_block_start", "index": at, "content_block": {**empty}}
            delta = _add(blocks[-1], part)
            yield {"type": "content_block_delta", "index": len(blocks) - 1, "delta": delta}
        yield {"type": "message_stop"}

    def result(self) -> dict[str, Any]:
        return self._message

    def error_event(self, error: ApiError) -> bytes:
        return event(error.body(ANTHROPIC_PATH, self._answers.request_id), "error")

    def _usage(self, end: AnswerEnd) -> dict[str, Any]:
        reused = end.finished.reused_tokens
        return {
            "input_tokens": self._answers.prompt_tokens - reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": end.finished.new_tokens,
        }


def _add(block: dict[str, Any], part: AnswerDelta) -> dict[str, Any]:
    """Make the delta of a content block's next part, and add it to the block."""
    if part.call:
        block["input"] = call_arguments(part.call.arguments)
        return {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind, text = block["type"], part.text or part.reasoning
    block[kind] += text
    return {"type": f"{kind}_delta", kind: text}
