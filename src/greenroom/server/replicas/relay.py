"""Pass a request to a replica, and to the next one if that is lost.

parts = relay(call, ask, lost=ConnectionError, leaves=removed.__contains__)
status, headers = await anext(parts)
async for data in parts: ...
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import JSONResponse

from greenroom.server.http.errors import ApiError
from greenroom.server.page.assets import DATA
from greenroom.server.replicas.responses import is_beat, last_event
from greenroom.server.web.calls import Call, Headers

TRIES = 3  # replicas that a request is sent to, one after another
UNAVAILABLE = 503  # of a replica whose model has failed, or that stops
LOST = "the replica that computed this answer was lost: send the request again"
# Called with the names of replicas that have failed. The context's parts are the name of a replica,
# the status and the headers, then the parts of the body.
Ask = Callable[[list[str]], AbstractAsyncContextManager[AsyncIterator[Any]]]


async def relay(
    call: Call, ask: Ask, lost: type[Exception], leaves: Callable[[str], bool]
) -> AsyncIterator[Any]:
    """Yield status and headers of a response, then the parts of its body.

    A replica is lost if `ask` raises `lost`. Another one is asked unless a part of the answer was
    yielded; then the stream ends with an error in the format of its API. A sign of life is no part
    of an answer. But after one the status is sent, so that a refusal of the next replica cannot be
    passed on: another one is asked, or its message ends the stream. Frames of the live page have no
    end of their own: they end where their replica is lost, or `leaves` says that it is to be
    removed, and the page asks again.
    """
    failed, sent, begun, events = list[str](), False, False, 0
    error = lost_error = ApiError(502, LOST, retry_after_s=1)
    while not begun and len(failed) < TRIES:
        name, status, headers = "", 0, Headers()
        try:
            async with ask(failed) as parts:
                async for part in parts:
                    if not status:
                        name, status, headers = part
                        if sent and status >= 400:
                            error = await _refusal(status, parts)
                            break
                        if status == UNAVAILABLE and len(failed) + 1 < TRIES:
                            break
                        continue
                    if not sent:
                        yield status, headers
                        sent = True
                    begun = begun or not is_beat(call.path, part)
                    events += part.count(b"\ndata: ")
                    yield part
                    if call.path == DATA and leaves(name):
                        return
                else:
                    return
        except lost:
            error = lost_error
        failed.append(name)
    if sent:
        if call.path != DATA:
            yield last_event(call.path, error, events)
        return
    response = refused(call.path, error)
    yield response.status_code, response.raw_headers
    yield response.body


async def _refusal(status: int, parts: AsyncIterator[Any]) -> ApiError:
    """Read the error that a replica has answered with, from the parts of its body."""
    content = json.loads(b"".join([part async for part in parts]))["error"]
    return ApiError(status, content if isinstance(content, str) else content["message"])


def refused(path: str, error: ApiError) -> JSONResponse:
    """Make the response of an error, in the format of the API at `path`."""
    return JSONResponse(error.body(path, ""), error.status, error.headers)
