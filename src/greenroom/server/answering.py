"""The route of an OpenAI API whose answers are shown whole or as chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from greenroom.server.answers import begin
from greenroom.server.routes import body_of, described, served_of
from greenroom.server.service import Service
from greenroom.server.streams import EventStream, event, told, whole


def route(service: Service, path: str, model: Any, shown_as: Callable[..., Any]) -> APIRouter:
    """POST `path` with a body of `model`; `shown_as(service, body, answers)` has `whole` and
    `events`."""
    routes = APIRouter()

    @routes.post(path, openapi_extra=described(model))
    async def answer(request: Request) -> Response:
        body = await body_of(request, service, model)
        served = served_of(request)
        answers = await begin(service, served, body.job)
        shown = shown_as(service, body, answers)
        if not body.stream:
            return JSONResponse(await whole(request, answers, shown.whole()))
        events = told(shown.events(), service, served, lambda error: event(error.body("", "")))
        return EventStream(events, answers, served)

    return routes
