"""Request bodies: bounded while they are read, and checked against the types of their API."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from greenroom.config import show_bytes
from greenroom.server.errors import GONE, ApiError
from greenroom.server.params import TAG

BODY_S = 30.0  # in which a body must be there
TOO_MANY = 100  # mistakes, of which none is worth a name
Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, model: type[Body], limit: int) -> Body:
    """The request's body as a `model`, of at most `limit` bytes. ApiError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Web pages of others can send other types without asking first.
        wanted = "the body must be JSON: send Content-Type: application/json"
        raise ApiError(415, wanted, close=True)
    try:
        data = await asyncio.wait_for(_collect(request, limit), BODY_S)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {BODY_S:g} seconds", close=True
        ) from None
    return await asyncio.to_thread(parse, model, data)


async def _collect(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than {show_bytes(limit)} (--max-body)", close=True
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise too_large
    except ClientDisconnect:
        raise ApiError(GONE, "the client hung up") from None
    return bytes(data)


def parse(model: type[Body], data: bytes) -> Body:
    """JSON as a `model`. ApiError names the first parameter that is wrong."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        if (count := error.error_count()) > TOO_MANY:
            raise ApiError(400, f"the body has {count:,} mistakes") from None
        first = error.errors(include_url=False, include_input=False)[0]
        raise _mistake(first, model.model_fields) from None


def _mistake(error: Any, fields: Container[str]) -> ApiError:
    """One mistake in words. Those about several parameters begin with the one to blame."""
    param = ".".join(part for each in error["loc"] if not (part := str(each)).startswith(TAG))
    kind, what = error["type"], error["msg"]
    code = None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {error['ctx']['error']}")
    if kind == "extra_forbidden":
        code, text = "unknown_parameter", f"{param} is not supported"
    elif kind == "missing":
        code, text = "missing_required_parameter", f"{param} is missing"
    elif kind == "none_required":
        code, text = "unsupported_parameter", f"{param} is not supported: leave it out"
    elif kind == "literal_error":
        code, text = "unsupported_value", f"{param} can only be {error['ctx']['expected']}"
    elif kind == "value_error":
        text = str(error["ctx"]["error"])
        first = text.partition(" ")[0].rstrip(":")
        text = text if not param or text.startswith(param) else f"{param}: {text}"
        param = param or (first if first in fields else "")
    elif kind == "union_tag_invalid":
        text = f"{param}: {error['ctx']['tag'].lstrip(TAG)[:40]} is not supported here"
    elif kind == "union_tag_not_found":
        text = f"{param} must be an object with a type"
    else:
        text = f"{param or 'the body'}: {what[:1].lower()}{what[1:]}"
    return ApiError(400, text, param=param or None, code=code or "invalid_value")
