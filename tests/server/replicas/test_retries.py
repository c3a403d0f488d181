"""A stream that waits when its replica is lost: another replica sends all of its events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp

from greenroom.config import ServeConfig
from greenroom.server.http import streams
from greenroom.server.http.service import Service
from greenroom.server.replicas.relay import LOST, relay
from greenroom.server.replicas.responses import is_beat
from greenroom.server.web.app import create_app
from greenroom.server.web.calls import Call, call_app
from tests.server.conftest import NAME, fake_engine

USER = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Once", "echo": True},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "Once"},
}
VARYING = re.compile(rb'"(id|item_id|created|created_at|\w+_duration)":("[^"]*"|[0-9]+)')


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ASGIApp]]:
    """A server whose requests wait, and one that answers at once."""
    monkeypatch.setattr(streams, "BEAT_S", 0.03)
    config = ServeConfig(port=0)
    services = [Service(fake_engine("Hi there", first_s=wait), config, NAME) for wait in (60, 0)]
    yield [create_app(each) for each in services]
    for each in services:
        each.close()


async def read(app: ASGIApp, call: Call, lost: bool = False) -> AsyncIterator[Any]:
    """Yield a response's head and parts; a `lost` server breaks off after its first beat."""
    async with aclosing(call_app(app, call)) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                yield "name", message["status"], message["headers"]
            elif part := message.get("body", b""):
                yield part
                if lost and is_beat(call.path, part):
                    raise ConnectionError


async def relayed(apps: list[ASGIApp], call: Call) -> list[bytes]:
    @asynccontextmanager
    async def ask(failed: list[str]) -> AsyncIterator[Any]:
        async with aclosing(read(apps[len(failed)], call, lost=not failed)) as parts:  # type: ignore[type-var]
            yield parts

    _, *parts = [part async for part in relay(call, ask, ConnectionError, lambda name: False)]
    return parts


@pytest.mark.parametrize("path", BODIES)
def test_a_waiting_stream_is_answered_by_another_replica(apps: list[ASGIApp], path: str) -> None:
    body = json.dumps({"model": NAME, "stream": True, **BODIES[path]}).encode()
    head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    call = Call("POST", path, head, body)

    async def both() -> tuple[list[bytes], list[bytes]]:
        _, *alone = [part async for part in read(apps[1], call)]
        return alone, await relayed(apps, call)

    alone, parts = asyncio.run(both())
    assert is_beat(path, parts[0])
    assert LOST.encode() not in b"".join(parts)
    assert [VARYING.sub(b"", part) for part in parts if not is_beat(path, part)] == [
        VARYING.sub(b"", part) for part in alone
    ]
    assert not any(is_beat(path, part) for part in alone)
