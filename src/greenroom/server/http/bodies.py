"""HTTP request bodies: read within limits of size and time, then checked by Pydantic."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from greenroom.config import show_bytes
from greenroom.json_file import without_strings
from greenroom.server.engine.requests import Busy
from greenroom.server.http.errors import CLIENT_CLOSED, ApiError
from greenroom.server.http.params import TAG
from greenroom.server.http.request_log import RequestRecord

BODY_S = 30.0  # in which a body must arrive
FREE_BYTES = 64 << 10  # of each body that do not count towards the budget
MOST_NESTS = 1 << 14  # objects and lists in a body: a message takes more than a kilobyte
MOST_MEMBERS = 1 << 18  # members of all objects and lists
LONGEST_LINE = 500  # characters of a message
TOO_MANY = 100  # mistakes; only their number is reported
# The error code and message, by pydantic's type of the mistake.
MISTAKES = {
    "extra_forbidden": ("unknown_parameter", "{param} is not supported"),
    "missing": ("missing_required_parameter", "{param} is missing"),
    "none_required": ("unsupported_parameter", "{param} is not supported: leave it out"),
    "literal_error": ("unsupported_value", "{param} must be {expected}"),
    "union_tag_invalid": ("invalid_value", "{param}: the type {tag} is not supported"),
    "union_tag_not_found": ("invalid_value", "{param} must be an object with a type"),
}
Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, model: type[Body], limit: int, budget: BodyBudget) -> Body:
    """Read an HTTP request's body, and parse it as a `model`; ApiError if it is not valid.

    Limits and further errors are those of `receive`.
    """
    kind = request.headers.get("content-type")
    # Foreign web pages can send other types, or none, without a CORS preflight. Browsers send the
    # origin of a page with every POST; LiteLLM sends no type.
    safe = kind is None and not {"origin", "sec-fetch-site"} & set(request.headers)
    if not safe and (kind or "").partition(";")[0].strip().lower() != "application/json":
        message = "the body must be JSON: send Content-Type: application/json"
        raise ApiError(415, message, close=True)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"a body encoded as {encoding[:40]!r} is not supported: send it without encoding"
        raise ApiError(415, message, close=True)
    data = await receive(request, limit, budget)
    return await asyncio.to_thread(parse, model, data)


async def receive(request: Request, limit: int, budget: BodyBudget) -> bytes:
    """Read an HTTP request's body.

    ApiError if the body is larger than `limit` bytes, or takes too long to arrive. The body's bytes
    count against `budget` until the request ends; Busy if too few are left.
    """
    try:
        return await asyncio.wait_for(_collect(request, limit, budget), BODY_S)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_S:g} seconds", close=True
        ) from None


async def _collect(request: Request, limit: int, budget: BodyBudget) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than the limit of {show_bytes(limit)} (--max-body)", close=True
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > limit:
                raise too_large
            budget.take(request.state.record, len(chunk))
            data += chunk
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED, "the client disconnected") from None
    return bytes(data)


class BodyBudget:
    """Limits the bytes of all HTTP request bodies together; used only in the event loop.

    The limit bounds memory: while a body is parsed, checked and prepared, its Python objects take
    several times its bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes

    def take(self, record: RequestRecord, nbytes: int) -> None:
        """Count `nbytes` more of a request's body, until the request ends.

        The first 64 KiB of each body are free. Busy if the limit of all bodies is exceeded.
        """
        before = record.body_bytes
        record.body_bytes += nbytes
        nbytes = max(0, record.body_bytes - FREE_BYTES) - max(0, before - FREE_BYTES)
        if nbytes > self._free:
            raise Busy(
                "the bodies of other requests leave no room for this one: try again later",
                retry_after_s=1.0,
            )
        self._free -= nbytes
        record.at_end.append(partial(self._give_back, nbytes))

    def _give_back(self, nbytes: int) -> None:
        self._free += nbytes


def check_parts(data: bytes) -> None:
    """Raise ApiError if a JSON text has too many objects, lists or members."""
    if _has_room(data):
        return
    if not _has_room(without_strings(data)):
        raise ApiError(
            400, f"the body has more than {MOST_NESTS:,} objects and lists, or {MOST_MEMBERS:,}"
            " members in them"
        )  # fmt: skip


def _has_room(data: bytes) -> bool:
    nests = data.count(b"{") + data.count(b"[")
    return nests <= MOST_NESTS and data.count(b",") <= MOST_MEMBERS


def parse(model: type[Body], data: bytes) -> Body:
    """Parse a request's JSON as a `model`. ApiError names the first wrong parameter."""
    check_parts(data)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        if (count := error.error_count()) > TOO_MANY:
            raise ApiError(400, f"the body has {count:,} invalid parameters") from None
        first = error.errors(include_url=False, include_input=False)[0]
        raise _mistake(first, model.model_fields) from None


def _mistake(error: Any, fields: Container[str]) -> ApiError:
    """Describe one mistake in a request as an ApiError; the message begins with the parameter."""
    param = ".".join(part for each in error["loc"] if not (part := str(each)).startswith(TAG))
    kind, what, about = error["type"], error["msg"], error.get("ctx", {})
    code = "invalid_value"
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {about['error']}")
    if kind in MISTAKES:
        code, text = MISTAKES[kind]
        tag = str(about.get("tag")).lstrip(TAG)[:40]
        text = text.format(param=param, expected=about.get("expected"), tag=tag)
    elif kind == "value_error":
        text = str(about["error"])
        first = text.partition(" ")[0].rstrip(":")
        text = text if not param or text.startswith(param) else f"{param}: {text}"
        param = param or (first if first in fields else "")
    else:
        text = f"{param or 'the body'}: {what[:1].lower()}{what[1:]}"
    line = " ".join(text.split())  # names of parameters, which it quotes, are a client's
    return ApiError(400, line[:LONGEST_LINE], param=param or None, code=code)
