"""Each attack alone, against one server of the demo model, which must go on as before."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil
import pytest

from tests.attacks.attacks import ASKED, bodies, hostile_requests, raw_attacks
from tests.cli.test_serve import served

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
MEMORY = 880 << 20
PATIENCE_S = 20.0  # of the processor, for an attack
JSON = {"content-type": "application/json"}
REFUSALS = {400, 403, 404, 413, 415, 422, 429, 431, 503, 504}
INSIDES = re.compile(r"Traceback|panicked|site-packages|\.py\b|\.rs\b|0x[0-9a-f]{6}|/root/|/home/")


@dataclass
class Target:
    """The attacked server, and what it answered before."""

    url: str
    pid: int
    text: str = ""

    def check(self) -> None:
        """The server is ready, answers as before, and keeps its memory."""
        assert httpx2.get(f"{self.url}/health", timeout=60).json() == {"status": "ready"}
        assert self.answer() == self.text
        assert psutil.Process(self.pid).memory_info().rss <= MEMORY

    def answer(self) -> str:
        body = {"model": "demo", "messages": ASKED, "max_tokens": 6, "temperature": 0}
        made = httpx2.post(f"{self.url}/v1/chat/completions", json=body, timeout=100).json()
        text: str = made["choices"][0]["message"]["content"]
        return text

    def computed_s(self) -> float:
        return sum(psutil.Process(self.pid).cpu_times()[:2])


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    options = ("--memory", MEMORY, "--context", 256, "--timeout", 60)
    with served(*options, cache=()) as (process, url, _):
        found = Target(url, process.pid)
        found.text = found.answer()
        yield found
        assert process.poll() is None


def refused(response: httpx2.Response) -> None:
    """The answer is an error of one line that shows nothing of the inside."""
    error: Any = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.strip()
    assert "\n" not in message
    assert len(message) < 500, message
    assert not INSIDES.search(message), message


@pytest.mark.parametrize("number", range(len(hostile_requests())))
def test_hostile_requests(target: Target, number: int) -> None:
    path, body = hostile_requests()[number]
    began = target.computed_s()
    data = json.dumps(body).encode()
    response = httpx2.post(f"{target.url}/v1/{path}", content=data, headers=JSON, timeout=100)
    assert response.status_code in REFUSALS | {200}, response.text[:300]
    if response.status_code != 200:
        refused(response)
    assert target.computed_s() - began < PATIENCE_S
    target.check()


@pytest.mark.parametrize("name", bodies())
def test_bodies_that_are_no_request(target: Target, name: str) -> None:
    data, status = bodies()[name]
    response = httpx2.post(f"{target.url}/v1/completions", content=data, headers=JSON, timeout=100)
    assert response.status_code == status, response.text[:300]
    refused(response)
    target.check()


@pytest.mark.parametrize("name", raw_attacks(0))
def test_bytes_that_are_no_http(target: Target, name: str) -> None:
    port = int(target.url.rpartition(":")[2])
    attack = raw_attacks(port)[name]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        received = b""
        try:
            connection.sendall(attack.data)
            while part := connection.recv(65536):
                received += part
                if b"\r\n\r\n" in received:
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass
    status = int(received.split()[1]) if received else 0
    assert status == attack.status, received[:300]
    assert not INSIDES.search(received.decode(errors="replace"))
    target.check()
