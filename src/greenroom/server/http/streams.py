"""Answers on their way to a client: as server-sent events or whole, given up when it hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from greenroom.errors import GreenroomError
from greenroom.server.engine.failures import contained
from greenroom.server.http.answers import Answers
from greenroom.server.http.errors import GONE, ApiError, as_api_error
from greenroom.server.http.request_log import Served
from greenroom.server.http.service import Service

BEAT_S = 15.0  # of silence, after which a comment shows that we are there
BEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
Whole = TypeVar("Whole")


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


async def whole(request: Request, answers: Answers, work: Coroutine[Any, Any, Whole]) -> Whole:
    """The result of `work`; ApiError 499, which nobody reads, where the client hangs up first."""
    working = asyncio.ensure_future(_contained(work))
    gone = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(GONE, "the client hung up")
    finally:
        await _drop(working, gone)
        await answers.leave()


async def _contained(work: Coroutine[Any, Any, Whole]) -> Whole:
    with contained():
        return await work
    raise AssertionError  # for mypy: `contained` raises


async def hung_up(receive: Receive) -> None:
    """Returns when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def told(
    events: AsyncIterator[bytes],
    service: Service,
    served: Served,
    say: Callable[[ApiError], bytes],
) -> AsyncIterator[bytes]:
    """Events to their end; where they fail, the last one says so in the API's own form."""
    broken: list[GreenroomError] = []
    with contained(broken.append):
        async for data in events:
            yield data
    for error in broken:
        known = as_api_error(error)
        if not isinstance(error, ApiError):
            service.log.failed(served.id, error)
        served.status, served.error = known.status, str(known)
        yield say(known)


class EventStream(StreamingResponse):
    """Sends events as they come. Whatever way it ends, the answers are let go."""

    def __init__(self, events: AsyncIterator[bytes], answers: Answers, served: Served) -> None:
        headers = {"cache-control": "no-cache"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._answers, self._served = answers, served
        self._last, self._complete = 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._complete:
                self._served.status = GONE
            await self._answers.leave()

    async def stream_response(self, send: Send) -> None:
        async def sending(message: Message) -> None:
            self._last = time.monotonic()
            await send(message)

        beat = asyncio.ensure_future(self._beat(sending))
        try:
            await super().stream_response(sending)
            self._complete = True
        finally:
            await _drop(beat)

    async def _beat(self, send: Send) -> None:
        """A long prompt says nothing for a while, which proxies could take for the end."""
        while True:
            await asyncio.sleep(BEAT_S / 3)
            if time.monotonic() - self._last >= BEAT_S:
                await send({"type": "http.response.body", "body": BEAT, "more_body": True})
