"""OpenAI's responses: POST /v1/responses.

The server stores no responses: each request contains the entire conversation.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.chat import EFFORTS
from greenroom.server.api.shared.conversation import (
    JsonForm,
    arguments_of,
    call,
    chat_job,
    thinking,
)
from greenroom.server.api.shared.output import Output
from greenroom.server.api.shared.pictures import Content, ContentValidator
from greenroom.server.engine.tokens.reader import AnswerEnd
from greenroom.server.http.answers import AnswerStream, Job
from greenroom.server.http.endpoints import ResponseBuilder, route
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import (
    CallId,
    ConversationParams,
    Function,
    FunctionType,
    Labels,
    Name,
    NamedFunction,
    StrictModel,
    Tokens,
    ToolChoice,
    Tools,
    Turns,
    by_type,
    tag,
    text_schema,
    text_validator,
    tool_choice_validator,
)
from greenroom.server.http.route_helpers import new_id
from greenroom.server.http.service import Service
from greenroom.server.http.streams import event

LOGPROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]
_TEXT = ("input_text", "output_text", "text")
InputText = Annotated[
    str, BeforeValidator(text_validator(_TEXT)), WithJsonSchema(text_schema(_TEXT))
]

CONTENT = ContentValidator(_TEXT, "input_image", nested=False)
InputContent = Annotated[Content, PlainValidator(CONTENT), WithJsonSchema(CONTENT.schema())]


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class InputItem(StrictModel):
    id: str | None = None
    status: Status | None = None


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    phase: None = None

    @model_validator(mode="after")
    def _has_place(self) -> MessageItem:
        if isinstance(self.content, tuple) and self.role != "user":
            raise ValueError(f"a message of the role {self.role} must not have pictures")
        return self

    def template_message(self, where: str) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class FunctionCallItem(InputItem):
    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str

    def template_message(self, where: str) -> dict[str, Any]:
        past = call(self.name, arguments_of(self.arguments, f"{where}.arguments"), self.call_id)
        return {"role": "assistant", "content": "", "tool_calls": [past]}


class FunctionOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: CallId
    output: InputText

    def template_message(self, where: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: None = None

    def template_message(self, where: str) -> dict[str, Any]:
        text = "\n".join(part.text for part in self.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": text}


Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[FunctionCallItem, tag("function_call")]
    | Annotated[FunctionOutputItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    by_type(default="message"),
]
Items = Annotated[
    Turns[Item],
    BeforeValidator(lambda it: [{"role": "user", "content": it}] if isinstance(it, str) else it),
]


class ResponsesTool(Function, FunctionType):
    pass


class ResponsesFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponsesFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                "text.format needs a schema if its type is json_schema, else must not have one"
            )
        return self

    def form(self) -> JsonForm | None:
        if self.type == "text":
            return None
        return JsonForm("text.format", "text.format.schema", self.schema_)


class TextConfig(StrictModel):
    format: ResponsesFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictModel):
    effort: EFFORTS | None = None
    summary: Literal["auto"] | None = None  # reasoning is returned whole
    generate_summary: None = None


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(ConversationParams):
    input: Items
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Tools[ResponsesTool] | None = None
    tool_choice: Annotated[ToolChoice, tool_choice_validator(NamedFunction)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    # Reasoning is returned as text, which needs no encrypted copy in a stateless conversation.
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=2),
        ]
        | None
    ) = None
    client_metadata: Labels | None = None
    stream_options: ResponsesStreamOptions | None = None
    # Supported only with their neutral values:
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    conversation: None = None
    context_management: None = None
    prompt: None = None
    max_tool_calls: None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponsesRequest:
        if self.top_logprobs is not None and not self.with_logprobs:
            raise ValueError(f"top_logprobs needs include: ['{LOGPROBS}']")
        return self

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def job(self, dialogue: Dialogue) -> Job:
        """Convert a request to the responses API to a Job: prompt and settings for the engine.

        ApiError if the model's chat template does not support the request.
        """
        form = self.text.format if self.text else None
        effort = self.reasoning.effort if self.reasoning else None
        return chat_job(
            dialogue,
            self._messages(),
            tools=self.tools,
            choice=self.tool_choice,
            form=form.form() if form else None,
            options=thinking(dialogue, effort, "reasoning.effort"),
            calls="function_call and function_call_output items",
            sampling=self.sampling(),
            max_tokens=self.max_output_tokens,
            top_logprobs=(self.top_logprobs or 0) if self.with_logprobs else None,
            one_call=self.parallel_tool_calls is False,
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Convert a request's items to messages, one for each turn of the model.

        Reasoning, text and calls of one turn are one message.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(self.input):
            message = item.template_message(f"input.{index}")
            last = messages[-1] if messages else None
            if last and last["role"] == message["role"] == "assistant":
                messages[-1] = _joined(last, message)
            else:
                messages.append(message)
        return messages


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Join two parts of one assistant turn into one message."""
    both = {**first, **then}
    both["content"] = "\n".join(text for text in (first["content"], then["content"]) if text)
    if "tool_calls" in both:
        both["tool_calls"] = [*first.get("tool_calls", ()), *then.get("tool_calls", ())]
    return both


def _choice(choice: ToolChoice) -> Any:
    return {"type": "function", "name": choice.name} if choice.name else choice.kind


BODIES = (ResponsesRequest,)


def router(service: Service) -> APIRouter:
    return route(service, "/v1/responses", ResponsesRequest, ResponsesBuilder, "create")


class ResponsesBuilder(ResponseBuilder):
    """Builds responses of OpenAI's responses API."""

    def __init__(self, service: Service, body: ResponsesRequest, answers: AnswerStream) -> None:
        super().__init__(service, body, answers)
        self._sequence = 0
        self._output = Output(answers.dialogue, body.with_logprobs)
        self._response: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(body.tool_choice or ToolChoice()),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "background": False,
        }

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response}
        async for _, part in self._answers:
            events = (
                self._output.end(part) if isinstance(part, AnswerEnd) else self._output.add(part)
            )
            for data in events:
                yield data
            if isinstance(part, AnswerEnd):
                self._response = self._ended(part)
                kind = f"response.{self._response['status']}"
                yield {"type": kind, "response": self._response}

    def result(self) -> dict[str, Any]:
        return self._response

    def error_event(self, error: ApiError) -> bytes:
        """Return the event response.failed, the last of a stream that failed."""
        message = {"code": "server_error", "message": str(error)}
        response = {**self._response, "status": "failed", "error": message}
        return self.event({"type": "response.failed", "response": response})

    def _ended(self, end: AnswerEnd) -> dict[str, Any]:
        cut = end.reason == "length"
        new, prompt = end.finished.new_tokens, self._answers.prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": end.finished.reused_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": prompt + new,
        }
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": usage,
        }

    def event(self, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return event({**data, "sequence_number": self._sequence - 1}, data["type"])


def _format(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    return form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
