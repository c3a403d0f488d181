"""Calls of the server's ASGI app without HTTP: the same checks, answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request with its complete body; header names are in lower case."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    query: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the app: HTTP status, request id, and body as JSON values."""

    status: int
    request_id: str
    body: Any


async def call_app(app: ASGIApp, call: Call) -> AsyncGenerator[Message]:
    """Call the app, and yield the messages of its response; closing the generator disconnects."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": call.method,
        "scheme": "http", "path": call.path, "raw_path": call.path.encode(),
        "query_string": call.query, "root_path": "", "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0), "headers": call.headers,
    }  # fmt: skip
    incoming: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    outgoing = asyncio.Queue[Message | None]()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the app is cancelled when the caller disconnects
        raise AssertionError  # for mypy

    async def run() -> None:
        try:
            await app(scope, receive, outgoing.put)
        finally:
            outgoing.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await outgoing.get()) is not None:
            yield message
        await running
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def post(app: ASGIApp, path: str, body: bytes) -> Response:
    """Send a JSON body to a path of the app, and return the response."""
    headers = [
        (b"host", b"localhost"), (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    start: Message = {}
    parts: list[bytes] = []
    async with contextlib.aclosing(call_app(app, Call("POST", path, headers, body))) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))
    headers_by_name = dict(start["headers"])
    return Response(
        start["status"], headers_by_name[b"x-request-id"].decode(), json.loads(b"".join(parts))
    )
