"""Calls of the server's ASGI app without HTTP: the same checks, answers and errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the app: HTTP status, request id, and body as JSON values."""

    status: int
    request_id: str
    body: Any


async def post(app: ASGIApp, path: str, body: bytes) -> Response:
    """Send a JSON body to a path of the app, and return the response."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
        "headers": [
            (b"host", b"localhost"), (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }  # fmt: skip
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the caller never disconnects
        raise AssertionError  # for mypy

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = dict(start["headers"])
    return Response(start["status"], headers[b"x-request-id"].decode(), json.loads(b"".join(parts)))
