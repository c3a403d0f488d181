"""Replicas with an API key: it is checked first; changes reach all; SIGTERM lets answers end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.deploy.ray.conftest import ENDS, NODES, Deployment, body, deployed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
CACHE = "/v1/admin/cache"


def resize(running: Deployment, cache: str) -> tuple[int, set[int]]:
    """The status of a change of the cache's size, and those of all replicas."""
    response = running.client.post(CACHE, json={"cache": cache})
    results = response.json()["replicas"]
    assert results.keys() == running.names()
    return response.status_code, {each["status"] for each in results.values()}


def read(running: Deployment, path: str, begun: threading.Event) -> str:
    """A streamed answer to the end."""
    text = ""
    with running.client.stream("POST", path, json=body(path, 1)) as response:
        for part in response.iter_text():
            text += part
            begun.set()
    return text


def test_a_key_and_changes_of_all_replicas(cluster: str, tmp_path: Path) -> None:
    with ExitStack() as stop:
        running = stop.enter_context(
            deployed(cluster, tmp_path, "--replicas", str(NODES), key="secret")
        )
        running.wait_for(NODES)
        large = b"x" * 5_000_000
        for headers in ({}, {"x-api-key": "wrong"}):
            found = httpx2.post(f"{running.url}/v1/messages", content=large, headers=headers)
            assert (found.status_code, found.json()["type"]) == (401, "error")
        assert httpx2.get(f"{running.url}/health").status_code == 200
        assert running.post("/v1/completions", {"prompt": "x" * 5_000_000}).status_code == 413
        assert resize(running, "50%") == (200, {200})
        assert resize(running, "many") == (400, {400})
        with ThreadPoolExecutor() as pool:
            begun, path = threading.Event(), "/v1/chat/completions"
            answer = pool.submit(read, running, path, begun)
            assert begun.wait(60)
            stop.close()  # SIGTERM, and the end of all processes
            assert ENDS[path] in answer.result()
