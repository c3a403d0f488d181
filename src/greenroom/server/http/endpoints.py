"""The route of an API whose answers are shown whole or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from greenroom.server.http.answers import Answers, begin
from greenroom.server.http.errors import ApiError
from greenroom.server.http.routes import body_of, described, served_of
from greenroom.server.http.service import Service
from greenroom.server.http.streams import EventStream, told, whole


class Shown(Protocol):
    """The answers to a request in the form of an API."""

    def __init__(self, service: Service, body: Any, answers: Answers) -> None: ...
    async def whole(self) -> dict[str, Any]: ...
    def events(self) -> AsyncIterator[bytes]: ...
    def failed(self, error: ApiError) -> bytes:
        """The last event of answers that broke off."""


def route(
    service: Service, path: str, model: Any, shown_as: type[Shown], name: str = "answer"
) -> APIRouter:
    """POST `path` with a body of `model`; `name` is what OpenAPI's document calls it."""
    routes = APIRouter()

    @routes.post(path, name=name, openapi_extra=described(model))
    async def answer(request: Request) -> Response:
        body = await body_of(request, service, model)
        served = served_of(request)
        answers = await begin(service, served, body.job)
        shown = shown_as(service, body, answers)
        if not body.stream:
            return JSONResponse(await whole(request, answers, shown.whole()))
        return EventStream(told(shown.events(), service, served, shown.failed), answers, served)

    return routes
