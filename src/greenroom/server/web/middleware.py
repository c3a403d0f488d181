"""ASGI middleware: request ids, the log, unexpected errors, checks of HTTP and of the key."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Collection
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from greenroom.server.http.errors import ApiError
from greenroom.server.http.keys import is_loopback
from greenroom.server.http.request_log import RequestLog, RequestRecord

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]\s/@]+)(?::[0-9]{0,5})?", re.ASCII | re.IGNORECASE)
MOST_FIELDS = 100  # headers of a request
OPEN = ("/health",)  # paths that need no key, for process supervisors


class LoggingMiddleware:
    """Gives every HTTP request an id and a log line; answers unexpected errors with 500."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = quote(scope["path"])[:200]
        record = RequestRecord(f"req_{secrets.token_hex(8)}", scope["method"], path)
        scope.setdefault("state", {})["record"] = record
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, record.status = True, message["status"]
                name = record.id.encode()
                ids = [(b"x-request-id", name), (b"request-id", name)]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            self._log.log_failure(record.id, error)
            if not begun:
                message = "the request failed in the server; the server's log has details"
                failed = ApiError(500, message)
                await answer(failed, scope, receive, sending)
            record.status = 500
        finally:
            record.release()
            self._log.log_request(record)


class CheckMiddleware:
    """Answers an HTTP request with the error that `check` returns for its head, if any."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], ApiError | None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is not None:
            await answer(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def head_error(scope: Scope) -> ApiError | None:
    """Return an error if a request's head breaks HTTP/1.1, or needs unsupported features.

    Source: RFC 9112.
    """
    headers, version = Headers(scope=scope), scope["http_version"]
    if len(headers) > MOST_FIELDS:
        most = f"at most {MOST_FIELDS} are allowed"
        return ApiError(431, f"the request has {len(headers)} headers: {most}", close=True)
    if version not in ("1.0", "1.1"):
        return ApiError(505, f"HTTP/{version} is not supported: use HTTP/1.1", close=True)
    hosts = headers.getlist("host")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return ApiError(400, f"a request must have one Host header, got {len(hosts)}", close=True)
    coding = headers.get("transfer-encoding")
    if coding is not None and version == "1.0":
        return ApiError(400, "HTTP/1.0 has no Transfer-Encoding: use HTTP/1.1", close=True)
    if coding is not None and coding.lower() != "chunked":
        return ApiError(501, "Transfer-Encoding must be chunked", close=True)
    return None


class KeyCheck:
    """Checks the API key of HTTP requests; if the server has none, the Host header.

    Without a key, only a Host header that names this machine is accepted: foreign web pages can
    reach a server on loopback under their own host names (DNS rebinding). /health needs no key, and
    neither do the paths of `files`.
    """

    def __init__(self, key: str | None, host: str, files: Collection[str] = ()) -> None:
        self._digest = _digest(key) if key is not None else None
        self._host, self._files = host.lower(), files

    def __call__(self, scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN:
            return None
        headers = Headers(scope=scope)
        if self._digest is None:
            host = headers.get("host")  # HTTP/1.0 may have none; web pages do not use it
            if host is not None and not self._is_ours(host):
                return ApiError(
                    403,
                    "the Host header must be localhost: for other names, start the server with an"
                    " API key (--api-key-file)",
                    close=True,
                )
            return None
        if scope["path"] in self._files:
            return None
        key = headers.get("x-api-key")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if key is None and scheme.lower() == "bearer":
            key = token.strip()
        if key is None:
            message = "no API key: send Authorization: Bearer KEY, or x-api-key: KEY"
            return ApiError(401, message, code="invalid_api_key", close=True)
        if not hmac.compare_digest(_digest(key), self._digest):
            return ApiError(401, "wrong API key", code="invalid_api_key", close=True)
        return None

    def _is_ours(self, host: str) -> bool:
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".").lower()
        return name == self._host or is_loopback(name)


def _digest(key: str) -> bytes:
    """Return an API key's digest of fixed length, so that comparing takes constant time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error to the client in the format of the API that was called."""
    await response(error, scope)(scope, receive, send)


def response(error: ApiError, scope: Scope) -> JSONResponse:
    """Make an HTTP error response in the format of the called API; record the error."""
    record: RequestRecord = scope["state"]["record"]
    record.error = str(error)
    return JSONResponse(error.body(scope["path"], record.id), error.status, error.headers)
