"""Answers of a running server to the requests of a batch."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import httpx2

from greenroom.errors import GreenroomError, UsageError
from greenroom.json_file import Malformed, parse
from greenroom.server.web.calls import Response

BUSY, UNAVAILABLE = 429, 503  # HTTP: the server has no place; it is loading, or it stops
AGAIN_S = 0.5  # after which a request is sent again
WAIT_S = 300.0  # for a server that cannot be reached, or is not available
LONGEST = 1 << 30  # bytes of an answer
TIMEOUT = httpx2.Timeout(3600.0, connect=10.0)  # an answer comes as a whole


class RemoteAnswerer:
    """Answers by a server, Greenroom's or another with these APIs.

    `key` is the server's API key, if it needs one. A request is sent again while the server has no
    place, is not available, or cannot be reached: only complete answers are results.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: the URL must begin with http:// or https://")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=TIMEOUT,
            limits=httpx2.Limits(max_connections=None),
        )  # fmt: skip

    def check_model(self, name: str) -> None:
        """Raise GreenroomError if the server cannot be reached, or does not have a model."""
        path = f"{self._url}/v1/models/{quote(name)}"
        try:
            response = httpx2.get(path, headers=self._headers, timeout=TIMEOUT)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise GreenroomError(f"{self._url}: {error or type(error).__name__}") from error
        if response.status_code >= 400:
            raise GreenroomError(
                f"{self._url} has no model {name!r} for this batch: HTTP {response.status_code}"
            )

    async def post(self, path: str, body: bytes) -> Response:
        """Return the response to a request; GreenroomError if the server stays unreachable."""
        failing_since: float | None = None
        while True:
            late = failing_since is not None and time.monotonic() > failing_since + WAIT_S
            try:
                response = await self._client.post(path, content=body)
                if response.status_code == BUSY:
                    failing_since = None
                elif response.status_code != UNAVAILABLE or late:
                    return _response(response)
            except httpx2.TransportError as error:
                if late:
                    raise GreenroomError(f"{self._url}: {error or type(error).__name__}") from error
            failing_since = failing_since or time.monotonic()
            await asyncio.sleep(AGAIN_S)

    def check(self) -> None:
        """Other requests may be answered, whatever one request has met."""

    async def close(self) -> None:
        await self._client.aclose()


def _response(response: httpx2.Response) -> Response:
    headers = response.headers
    name = headers.get("request-id") or headers.get("x-request-id") or ""
    try:
        body = parse(response.content, LONGEST, unique=False)
        return Response(response.status_code, name, body)
    except Malformed:
        return Response(response.status_code, name, response.text)
