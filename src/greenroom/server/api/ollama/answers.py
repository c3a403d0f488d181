"""Ollama's chat and generate: POST /api/chat and /api/generate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.chat import Tool
from greenroom.server.api.ollama.params import (
    NoContext,
    NoSuffix,
    NoTemplate,
    OllamaRequest,
)
from greenroom.server.api.ollama.responses import (
    LineBuilder,
    OllamaChatBuilder,
    OllamaGenerateBuilder,
    now,
)
from greenroom.server.api.shared.conversation import call, chat_job, form_grammar
from greenroom.server.api.shared.pictures import Content, PicturePart, join_texts
from greenroom.server.http.answers import Job
from greenroom.server.http.endpoints import respond
from greenroom.server.http.params import CallId, Name, StrictModel, Tools
from greenroom.server.http.route_helpers import openapi_body, read_body
from greenroom.server.http.service import Service


class OllamaFunction(StrictModel):
    name: Name
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(StrictModel):
    """A tool call in an earlier message of Ollama's chat."""

    function: OllamaFunction
    id: CallId | None = None
    type: Literal["function"] | None = None


class OllamaMessage(StrictModel):
    """One message of Ollama's chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Name | None = None
    tool_call_id: CallId | None = None
    images: list[str] | None = None

    @model_validator(mode="after")
    def _fits(self) -> OllamaMessage:
        if self.role != "user" and self.images:
            raise ValueError(f"a message of the role {self.role} must not have images")
        if self.role != "assistant" and (self.tool_calls or self.thinking):
            raise ValueError(
                f"a message of the role {self.role} must not have tool_calls or thinking"
            )
        if self.role != "tool" and (self.tool_name or self.tool_call_id):
            raise ValueError(
                f"a message of the role {self.role} must not have tool_name or tool_call_id"
            )
        return self


def template_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages of Ollama's chat to the form that chat templates take.

    Ollama's tool calls need no ids, and chat templates may: calls are numbered, and a tool result
    without an id belongs to the earliest call of its tool that has no result.
    """
    converted: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # the tool and the id of each call
    number = 0
    for one in messages:
        message: dict[str, Any] = {
            "role": one.role,
            "content": _with_images(one.content, one.images),
        }
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            message["tool_calls"] = []
            for past in one.tool_calls:
                name, call_id = past.function.name, past.id or f"call{number:05}"
                message["tool_calls"].append(call(name, past.function.arguments, call_id))
                unanswered.append((name, call_id))
                number += 1
        if one.role == "tool":
            _join_result(message, one, unanswered)
        converted.append(message)
    return converted


def _with_images(text: str | None, images: list[str] | None) -> Content:
    """Return a message's content: its pictures, and then its text."""
    parts = [PicturePart(EncodedPicture(each), "images") for each in images or ()]
    return join_texts([*parts, text or ""])


def _join_result(
    message: dict[str, Any], result: OllamaMessage, unanswered: list[tuple[str, str]]
) -> None:
    """Give a tool result the id and the tool's name of its call."""
    for name, call_id in unanswered:
        if result.tool_call_id in (None, call_id) and result.tool_name in (None, name):
            unanswered.remove((name, call_id))
            message |= {"name": name, "tool_call_id": call_id}
            return
    sent = {"name": result.tool_name, "tool_call_id": result.tool_call_id}
    message |= {name: value for name, value in sent.items() if value is not None}


class OllamaChatRequest(OllamaRequest):
    """Request body of Ollama's chat; without messages, the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Tools[Tool] | None = None

    @property
    def loads(self) -> bool:
        return not self.messages

    def job(self, dialogue: Dialogue) -> Job:
        """Convert a request of Ollama's chat to a Job: prompt and settings for the engine.

        ApiError if the model's chat template does not support the request.
        """
        return self.within_context(
            chat_job(
                dialogue,
                template_messages(self.messages or []),
                tools=[tool.function for tool in self.tools or ()],
                choice=None,
                form=self.form(),
                options=self.reasoning(dialogue),
                calls="messages of the role tool",
                **self.settings(),
            )
        )


class OllamaGenerateRequest(OllamaRequest):
    """Request body of Ollama's generate; without a prompt, the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    # Supported only with their neutral values:
    suffix: NoSuffix | None = None
    template: NoTemplate | None = None
    context: NoContext | None = None

    @model_validator(mode="after")
    def _fits(self) -> OllamaGenerateRequest:
        if self.raw and (self.system or self.think or self.images):
            raise ValueError("raw takes the prompt as it is: leave out system, think and images")
        return self

    @property
    def loads(self) -> bool:
        return not self.prompt and not self.images

    def job(self, dialogue: Dialogue) -> Job:
        """Convert a request of Ollama's generate to a Job: prompt and settings for the engine.

        ApiError if the model's chat template does not support the request.
        """
        prompt = self.prompt or ""
        if self.raw:
            grammar = form_grammar(self.form())
            job = Job((tuple(dialogue.encode(prompt)),), grammar=grammar, plain=True,
                      **self.settings())  # fmt: skip
            return self.within_context(job)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        job = chat_job(
            dialogue,
            [*messages, {"role": "user", "content": _with_images(prompt, self.images)}],
            tools=None,
            choice=None,
            form=self.form(),
            options=self.reasoning(dialogue),
            calls="tool calls",
            **self.settings(),
        )
        return self.within_context(job)


BODIES = (OllamaChatRequest, OllamaGenerateRequest)


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    _add_route(routes, service, "/api/chat", OllamaChatRequest, OllamaChatBuilder)
    _add_route(routes, service, "/api/generate", OllamaGenerateRequest, OllamaGenerateBuilder)
    return routes


def _add_route(
    routes: APIRouter, service: Service, path: str, model: Any, builder: type[LineBuilder]
) -> None:
    @routes.post(path, name=path, openapi_extra=openapi_body(model))
    async def answer(request: Request) -> Response:
        body = await read_body(request, service, model)
        body.check_context(service.engine.context)
        if not body.loads:
            return await respond(request, service, body, builder, body.streams)
        service.dialogue()  # ApiError 503 before the model is loaded
        end = {"done": True, "done_reason": "load"}
        name = service.models[service.variant_of(body.model)]
        return JSONResponse({"model": name, "created_at": now(), **builder.content(""), **end})
