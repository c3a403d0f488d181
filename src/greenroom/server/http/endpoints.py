"""`route` makes the POST route of an API: read a request, answer it, send the response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from greenroom.server.http.answers import AnswerStream, start_answers
from greenroom.server.http.errors import ApiError
from greenroom.server.http.route_helpers import openapi_body, read_body, record_of
from greenroom.server.http.service import Service
from greenroom.server.http.streams import (
    BEAT,
    EventStream,
    end_with_error,
    event,
    result_or_disconnect,
)


class ResponseBuilder:
    """Builds HTTP responses in an API's format: a stream of parts, or one object."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, body: Any, answers: AnswerStream) -> None:
        self._model = service.models[answers.variant]
        self._body, self._answers = body, answers

    def parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of a streamed response, each as a JSON object."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Return the complete response as one JSON object, after the last of its parts."""
        raise NotImplementedError

    def event(self, data: dict[str, Any]) -> bytes:
        """Encode a part of a response as a server-sent event."""
        return event(data, data["type"])

    def closing_events(self) -> bytes:
        """Return the server-sent events after the last part of a response."""
        return b""

    def error_event(self, error: ApiError) -> bytes:
        """Return the last server-sent event of a stream that failed."""
        raise NotImplementedError

    def beat(self) -> bytes:
        """Return what a stream sends during a long silence."""
        return BEAT

    async def complete_result(self) -> dict[str, Any]:
        async for _ in self.parts():
            pass
        return self.result()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the encoded parts of a stream, none before the engine has begun an answer.

        Until then another replica can answer the request instead.
        """
        await self._answers.wait_for_event()
        async for data in self.parts():
            yield self.event(data)
        if closing := self.closing_events():
            yield closing


def route(
    service: Service, path: str, model: Any, builder: type[ResponseBuilder], name: str = "answer"
) -> APIRouter:
    """Make the POST route `path` of an HTTP API, which returns the engine's answers.

    `model` is the Pydantic model of the request body, whose method `job` makes the engine's Job.
    `builder` formats the response. `name` is the route's name in the OpenAPI document.
    """
    routes = APIRouter()

    @routes.post(path, name=name, openapi_extra=openapi_body(model))
    async def answer(request: Request) -> Response:
        body = await read_body(request, service, model)
        return await respond(request, service, body, builder, body.stream)

    return routes


async def respond(
    request: Request, service: Service, body: Any, builder: type[ResponseBuilder], stream: bool
) -> Response:
    """Start the engine's answers to a request; return a stream of their parts, or one object."""
    record = record_of(request)
    variant = service.variant_of(body.model)
    answers = await start_answers(service, record, body.job, variant)
    response = builder(service, body, answers)
    if not stream:
        return JSONResponse(
            await result_or_disconnect(request, answers, response.complete_result())
        )
    return EventStream(
        end_with_error(response.events(), service, record, response.error_event),
        answers,
        record,
        response.media_type,
        response.beat,
    )
