"""Pass a request to a replica, and to the next one if that is lost.

parts = relay(call, ask, lost=ConnectionError, leaves=removed.__contains__)
status, headers = await anext(parts)
async for data in parts: ...
"""

from __future__ import annotations

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
    of an answer. Frames of the live page have no end of their own: they end where their replica is
    lost, or `leaves` says that it is to be removed, and the page asks again.
    """
    failed, sent, begun, events = list[str](), False, False, 0
    while not begun and len(failed) < TRIES:
        name, status, headers = "", 0, Headers()
        try:
            async with ask(failed) as parts:
                async for part in parts:
                    if not status:
                        name, status, headers = part
                        if status == UNAVAILABLE and (sent or len(failed) + 1 < TRIES):
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
            pass
        failed.append(name)
    error = ApiError(502, LOST, retry_after_s=1)
    if sent:
        if call.path != DATA:
            yield last_event(call.path, error, events)
        return
    response = refused(call.path, error)
    yield response.status_code, response.raw_headers
    yield response.body


def refused(path: str, error: ApiError) -> JSONResponse:
    """Make the response of an error, in the format of the API at `path`."""
    return JSONResponse(error.body(path, ""), error.status, error.headers)
