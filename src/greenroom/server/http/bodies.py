"""Request bodies: bounded while they are read, and checked against the types of their API."""

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

BODY_S = 30.0  # in which a body must be there
FREE_BYTES = 64 << 10  # of each body, for which there is always room
MOST_NESTS = 1 << 14  # objects and lists in a body: a message takes more than a kilobyte
MOST_MEMBERS = 1 << 18  # members of all of these
TOO_MANY = 100  # mistakes, of which none is worth a name
# The code and the words of a mistake, by pydantic's name for it.
MISTAKES = {
    "extra_forbidden": ("unknown_parameter", "{param} is not supported"),
    "missing": ("missing_required_parameter", "{param} is missing"),
    "none_required": ("unsupported_parameter", "{param} is not supported: leave it out"),
    "literal_error": ("unsupported_value", "{param} can only be {expected}"),
    "union_tag_invalid": ("invalid_value", "{param}: {tag} is not supported here"),
    "union_tag_not_found": ("invalid_value", "{param} must be an object with a type"),
}
Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, model: type[Body], limit: int, room: BodyBudget) -> Body:
    """The request's body as a `model`, of at most `limit` bytes. ApiError for anything else.

    It has its place in `room` until the request ends.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Web pages of others can send other types without asking first.
        wanted = "the body must be JSON: send Content-Type: application/json"
        raise ApiError(415, wanted, close=True)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        wanted = f"a body that is encoded as {encoding[:40]!r} is not supported: send it as it is"
        raise ApiError(415, wanted, close=True)
    try:
        data = await asyncio.wait_for(_collect(request, limit, room), BODY_S)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {BODY_S:g} seconds", close=True
        ) from None
    return await asyncio.to_thread(parse, model, data)


async def _collect(request: Request, limit: int, room: BodyBudget) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than {show_bytes(limit)} (--max-body)", close=True
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > limit:
                raise too_large
            room.take(request.state.record, len(chunk))
            data += chunk
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED, "the client hung up") from None
    return bytes(data)


class BodyBudget:
    """The bytes that the bodies of all requests may have together; used by the event loop alone.

    What becomes of a body while it is read, checked and prepared takes several times as much.
    """

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes

    def take(self, record: RequestRecord, nbytes: int) -> None:
        """For a part of a request's body, until the request ends. Busy where there is none."""
        before = record.body_bytes
        record.body_bytes += nbytes
        nbytes = max(0, record.body_bytes - FREE_BYTES) - max(0, before - FREE_BYTES)
        if nbytes > self._free:
            raise Busy("the requests under way have too large bodies", retry_after_s=1.0)
        self._free -= nbytes
        record.at_end.append(partial(self._give_back, nbytes))

    def _give_back(self, nbytes: int) -> None:
        self._free += nbytes


def check_parts(data: bytes) -> None:
    """ApiError where a JSON text has so many parts that it would fill the memory as objects."""
    if _has_room(data):
        return
    if not _has_room(without_strings(data)):
        raise ApiError(
            400, f"the body has more than {MOST_NESTS:,} objects and lists, or {MOST_MEMBERS:,}"
            " members of these"
        )  # fmt: skip


def _has_room(data: bytes) -> bool:
    nests = data.count(b"{") + data.count(b"[")
    return nests <= MOST_NESTS and data.count(b",") <= MOST_MEMBERS


def parse(model: type[Body], data: bytes) -> Body:
    """JSON as a `model`. ApiError names the first parameter that is wrong."""
    check_parts(data)
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
    return ApiError(400, text, param=param or None, code=code)
