"""Small functions that handlers of HTTP routes call: body, log record, ids, OpenAPI."""

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
    """Return OpenAPI's description of a route whose request body is a `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, service: Service, model: type[Body]) -> Body:
    """Read an HTTP request's body as a `model`, and check its field "model".

    ApiError if the body is not valid, or names a model that is not served.
    """
    body = await bodies.read(request, model, service.max_body, service.bodies)
    if (name := getattr(body, "model", None)) is not None:
        service.variant_of(name)
    return body


def record_of(request: Request) -> RequestRecord:
    """Return the log record of an HTTP request."""
    record: RequestRecord = request.state.record
    return record


def new_id(prefix: str) -> str:
    """Return a random id for a response or a part of it."""
    return f"{prefix}{secrets.token_hex(12)}"
