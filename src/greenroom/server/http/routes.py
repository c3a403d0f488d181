"""Helpers of the HTTP routes of all APIs."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from greenroom.server.http import bodies
from greenroom.server.http.request_log import RequestRecord
from greenroom.server.http.service import Service

REF = "#/components/schemas/{model}"
Body = TypeVar("Body", bound=BaseModel)


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return OpenAPI's description of a route whose body is a `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, service: Service, model: type[Body]) -> Body:
    """Read and check an HTTP request's body; ApiError if the request names another model."""
    body = await bodies.read(request, model, service.max_body, service.bodies)
    if (name := getattr(body, "model", None)) is not None:
        service.check_model(name)
    return body


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
