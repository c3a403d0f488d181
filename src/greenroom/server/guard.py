"""What stands before the API: request ids, the log, errors that nobody expected, and the key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from greenroom.server.errors import ApiError
from greenroom.server.served import RequestLog, Served

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
OPEN = ("/health",)  # for those who watch over processes


class Noted:
    """Gives every request an id of the server's own and a line in the log; nothing gets past it."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = quote(scope["path"])[:200]
        served = Served(f"req_{secrets.token_hex(8)}", scope["method"], path)
        scope.setdefault("state", {})["served"] = served
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, served.status = True, message["status"]
                name = served.id.encode()
                ids = [(b"x-request-id", name), (b"request-id", name)]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            self._log.failed(served.id, error)
            if not begun:
                failed = ApiError(500, "the server failed; its log has more")
                await answer(failed, scope, receive, sending)
            served.status = 500
        finally:
            served.end()
            self._log.line(served)


class Keyed:
    """Lets in who has the key. Without one, only those who call this machine by its own name.

    A name in the Host header that is not ours is how web pages reach servers on loopback (DNS
    rebinding).
    """

    def __init__(self, app: ASGIApp, key: str | None, host: str) -> None:
        self._app = app
        self._digest = _digest(key) if key is not None else None
        self._hosts = LOOPBACK | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            error = self._refusal(Headers(scope=scope))
            if error is not None:
                await answer(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._digest is None:
            host = headers.get("host", "")
            if host and not self._is_ours(host):
                return ApiError(403, "this server is called localhost", close=True)
            return None
        given = headers.get("x-api-key")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if given is None and scheme.lower() == "bearer":
            given = token.strip()
        if given is None:
            wanted = "no API key: send Authorization: Bearer KEY, or x-api-key: KEY"
            return ApiError(401, wanted, code="invalid_api_key", close=True)
        if not hmac.compare_digest(_digest(given), self._digest):
            return ApiError(401, "wrong API key", code="invalid_api_key", close=True)
        return None

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        return host in self._hosts or (bool(colon) and port.isdecimal() and name in self._hosts)


def _digest(key: str) -> bytes:
    """Of one length, so that comparing takes one time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error in the format of the API that was called."""
    served: Served = scope["state"]["served"]
    served.error = str(error)
    body = error.body(scope["path"], served.id)
    await JSONResponse(body, error.status, error.headers)(scope, receive, send)
