"""The gate of several servers: it checks the key first, and reads bodies within limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from greenroom.config import ServeConfig
from greenroom.server.http import bodies
from greenroom.server.replicas.gate import RequestGate
from greenroom.server.replicas.responses import Answer
from greenroom.server.web.calls import Call

CHAT, KEY = "/v1/chat/completions", (b"x-api-key", b"secret")
HEAD = [(b"content-type", b"application/json"), (b"x-request-id", b"req_1"), (b"request-id", b"1")]
LARGE = b"x" * 900_000


class Gates:
    """A gate, and the calls that it has passed on; `go` lets replicas answer."""

    def __init__(self, **options: Any) -> None:
        self.calls, self.reads, self.go = list[Call](), 0, asyncio.Event()
        self.found: list[Answer | BaseException] = []
        config = ServeConfig(host="0.0.0.0", max_body="1MB", **options)
        self._gate = RequestGate(
            config, "secret", 1, self._ask, self._broadcast, ConnectionError, lambda name: False
        )

    @asynccontextmanager
    async def _ask(self, call: Call, failed: list[str]) -> AsyncIterator[Any]:
        self.calls.append(call)

        async def parts() -> AsyncIterator[Any]:
            await self.go.wait()
            yield "a", 200, HEAD
            yield b"one"
            yield b"two"

        yield parts()

    async def _broadcast(self, call: Call) -> list[Answer | BaseException]:
        self.calls.append(call)
        return self.found

    def request(
        self, path: str, method: str, body: bytes | None, headers: tuple[Any, ...]
    ) -> Request:
        async def receive() -> Any:
            self.reads += 1
            if body is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": body, "more_body": False}

        return Request(
            {"type": "http", "method": method, "path": path, "query_string": b"", "headers":
             [(b"host", b"example.org"), *headers]}, receive,
        )  # fmt: skip

    async def send(
        self, path: str = CHAT, method: str = "POST", body: bytes | None = b"{}", *headers: Any
    ) -> Response:
        return await self._gate.respond(self.request(path, method, body, headers))


async def text(response: Any) -> bytes:
    parts: list[bytes] = [part async for part in response.body_iterator]
    return b"".join(parts)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("headers", [(), ((b"x-api-key", b"wrong"),)])
@pytest.mark.parametrize("path", [CHAT, "/metrics", "/v1/admin/cache", "/v1/live"])
def test_without_the_key_nothing_is_read_or_passed_on(path: str, headers: tuple[Any, ...]) -> None:
    async def test() -> None:
        gates = Gates()
        response = await gates.send(path, "POST", LARGE, *headers)
        assert (response.status_code, gates.reads, gates.calls) == (401, 0, [])

    run(test)


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/"), ("OPTIONS", CHAT)])
def test_what_a_server_answers_without_a_key_is_passed_on(method: str, path: str) -> None:
    async def test() -> None:
        gates = Gates()
        gates.go.set()
        assert (await gates.send(path, method)).status_code == 200
        assert [each.path for each in gates.calls] == [path]

    run(test)


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.02)

    async def test() -> None:
        gates = Gates()
        response = await gates.send(CHAT, "POST", None, KEY)
        assert (response.status_code, gates.calls) == (408, [])

    run(test)


def test_a_body_that_is_too_large_is_refused() -> None:
    async def test() -> None:
        gates = Gates()
        assert (await gates.send(CHAT, "POST", b"x" * 1_000_001, KEY)).status_code == 413
        assert gates.calls == []

    run(test)


def test_bodies_that_wait_are_bounded_together() -> None:
    async def test() -> None:
        gates = Gates()
        waiting = [asyncio.ensure_future(gates.send(CHAT, "POST", LARGE, KEY)) for _ in range(2)]
        while len(gates.calls) < 2:
            await asyncio.sleep(0)
        assert (await gates.send(CHAT, "POST", LARGE, KEY)).status_code == 429
        gates.go.set()
        one, two = await asyncio.gather(*waiting)
        assert (await gates.send(CHAT, "POST", LARGE, KEY)).status_code == 429
        assert await text(one) == await text(two) == b"onetwo"
        assert (await gates.send(CHAT, "POST", LARGE, KEY)).status_code == 200

    run(test)


def test_the_head_of_a_replicas_response_but_its_request_id() -> None:
    async def test() -> None:
        gates = Gates()
        gates.go.set()
        response = await gates.send(CHAT, "POST", b"{}", KEY)
        assert response.raw_headers == [HEAD[0], HEAD[2]]
        assert gates.calls[0].body == b"{}"
        assert KEY in gates.calls[0].headers

    run(test)


def test_a_change_names_the_result_of_each_replica() -> None:
    async def test() -> None:
        gates = Gates()
        gates.found = [("a", 200, HEAD, b'{"slots": 4}'), ("b", 400, HEAD, b'{"error": "no"}')]
        response = await gates.send("/v1/admin/cache", "POST", b"{}", KEY)
        assert response.status_code == 400
        assert json.loads(bytes(response.body))["replicas"]["a"] == {"status": 200, "slots": 4}
        gates.found = [ConnectionError()]
        response = await gates.send("/v1/admin/cache", "POST", b"{}", KEY)
        assert response.status_code == 503

    run(test)
