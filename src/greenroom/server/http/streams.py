"""HTTP responses: streamed events or one object, cancelled if the client disconnects."""

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
from greenroom.server.engine.failures import contain_errors
from greenroom.server.http.answers import AnswerStream
from greenroom.server.http.errors import CLIENT_CLOSED, ApiError, as_api_error
from greenroom.server.http.request_log import RequestRecord
from greenroom.server.http.service import Service

BEAT_S = 15.0  # of silence, after which a comment is sent
BEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def event(data: Any, name: str | None = None) -> bytes:
    """Encode JSON-ready data as one server-sent event, with an optional event name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


async def result_or_disconnect(
    request: Request, answers: AnswerStream, work: Coroutine[Any, Any, Result]
) -> Result:
    """Return the result of `work`, or raise ApiError 499 if the client disconnects first."""
    working = asyncio.ensure_future(_contained(work))
    disconnected = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_CLOSED, "the client disconnected")
    finally:
        await _drop(working, disconnected)
        await answers.cancel_and_wait()


async def _contained(work: Coroutine[Any, Any, Result]) -> Result:
    with contain_errors():
        return await work
    raise AssertionError  # for mypy: `contain_errors` raises


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the HTTP client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def end_with_error(
    events: AsyncIterator[bytes],
    service: Service,
    record: RequestRecord,
    error_event: Callable[[ApiError], bytes],
) -> AsyncIterator[bytes]:
    """Yield server-sent events; if an exception ends them, the last event is the error.

    `error_event` encodes the error in the API's format.
    """
    broken: list[GreenroomError] = []
    with contain_errors(broken.append):
        async for data in events:
            yield data
    for error in broken:
        api_error = as_api_error(error)
        if not isinstance(error, ApiError):
            service.log.log_failure(record.id, error)
        record.status, record.error = api_error.status, str(api_error)
        yield error_event(api_error)


class EventStream(StreamingResponse):
    """HTTP response of streamed events, which cancels unfinished answers at its end.

    `beat` makes what is sent during a long silence.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        answers: AnswerStream,
        record: RequestRecord,
        media_type: str,
        beat: Callable[[], bytes],
    ) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"}, media_type=media_type)
        self._answers, self._record, self._make_beat = answers, record, beat
        self._last, self._complete = 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._complete:
                self._record.status = CLIENT_CLOSED
            await self._answers.cancel_and_wait()

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
        """Send beats during a long prompt; proxies could close a silent connection."""
        while True:
            await asyncio.sleep(BEAT_S / 3)
            if time.monotonic() - self._last >= BEAT_S:
                beat = self._make_beat()
                await send({"type": "http.response.body", "body": beat, "more_body": True})
