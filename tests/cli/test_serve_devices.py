"""Devices added and removed over HTTP, while a server's engine answers requests of all APIs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import httpx2
import pytest

from tests.cli.test_serve import served

CHANGES = 8  # of the devices while requests run
CLIENTS = 4
SLOTS = {"fake": 64, "fake,fake": 128}  # a quarter of the demo model's experts on each device
USER = [{"role": "user", "content": "The king of the town had a ship, and"}]
COMMON = {"model": "demo", "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMMON, "prompt": "The king of the town", "max_tokens": 40},
    "/v1/chat/completions": {**COMMON, "messages": USER, "max_tokens": 40, "logprobs": True},
    "/v1/responses": {**COMMON, "input": USER, "max_output_tokens": 40},
    "/v1/messages": {**COMMON, "messages": USER, "max_tokens": 40},
    "/api/chat": {"model": "demo", "messages": USER,
                  "options": {"temperature": 0, "num_predict": 40}},
}  # fmt: skip
# Two changes are a second apart, so that they do not delay answers; here they should.
BEFORE = "from greenroom.server.api.shared import resizes; resizes.REST_S = 0.02\n"


@contextmanager
def serving() -> Iterator[httpx2.Client]:
    """A client of a server on two devices, the second of them without experts."""
    options = ("--device", "fake,fake", "--spare-devices", 1, "--batch-invariant")
    environment = {**os.environ, "GREENROOM_API_KEY": "key"}
    with (
        served(*options, before=BEFORE, env=environment) as (process, url, _),
        httpx2.Client(base_url=url, headers={"x-api-key": "key"}, timeout=100) as client,
    ):
        yield client
        assert process.poll() is None


def content(client: httpx2.Client, path: str) -> Any:
    """What an answer says, without ids, times and reused tokens."""
    response = client.post(path, json={**BODIES[path], "stream": False})
    assert response.status_code == 200, response.text
    answer = response.json()
    if path == "/v1/responses":
        return [each["content"] for each in answer["output"]]
    return answer.get("choices") or answer.get("content") or answer["message"]


def change(client: httpx2.Client, devices: str) -> httpx2.Response:
    return client.post("/v1/admin/devices", json={"devices": devices})


def stats(client: httpx2.Client) -> tuple[dict[str, int], dict[str, int]]:
    """The server's memory, and the bytes of each link."""
    found = client.get("/v1/stats").json()
    return found["memory"], {each["link"]: each["bytes"] for each in found["links"]}


@pytest.mark.process
@pytest.mark.timeout(240)
def test_devices_come_and_go_while_requests_run() -> None:
    with serving() as client, ThreadPoolExecutor(CLIENTS) as pool:
        expected = {path: content(client, path) for path in BODIES}
        memory, links = stats(client)
        assert memory["slots"] == SLOTS["fake"]
        assert links["host -> fake:1"] == 0
        ended = threading.Event()

        def ask(number: int) -> int:
            """Ask until the changes are made; how many answers came."""
            count, paths = 0, cycle([*BODIES][number:] + [*BODIES][:number])
            while not ended.is_set():
                path = next(paths)
                assert content(client, path) == expected[path]
                count += 1
            return count

        asked = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            for number, devices in zip(range(CHANGES), cycle(["fake,fake", "fake"])):
                passes = client.get("/v1/stats").json()["passes"]["count"]
                changed = change(client, devices)
                names = [f"fake:{place}" for place in range(devices.count("fake"))]
                assert changed.json() == {"slots": SLOTS[devices], "devices": names}
                memory, links = stats(client)
                assert memory["slots"] == SLOTS[devices]
                assert memory["resident_bytes"] <= SLOTS[devices] * memory["slot_bytes"]
                now = passes
                while now < passes + 20:  # answers go on, on the devices that there are
                    assert not any(each.done() for each in asked), number
                    now = client.get("/v1/stats").json()["passes"]["count"]
        finally:
            ended.set()
        assert sum(each.result() for each in asked) >= CLIENTS
        assert stats(client)[1]["host -> fake:1"] > 0
        check_that_a_device_that_went_gets_nothing(client, expected)


def check_that_a_device_that_went_gets_nothing(
    client: httpx2.Client, expected: dict[str, Any]
) -> None:
    """One device computes the same, and a wrong name changes nothing."""
    before, links = stats(client)
    for devices in ("fake:1", "cuda:0", "fake,fake,fake"):
        refused = change(client, devices)
        assert refused.status_code == 400, devices
        assert "device" in refused.json()["error"]["message"]
    assert {path: content(client, path) for path in BODIES} == expected
    after, later = stats(client)
    assert after["slots"] == before["slots"] == SLOTS["fake"]
    assert after["resident_bytes"] == SLOTS["fake"] * after["slot_bytes"]
    assert after["expected_bytes"] == before["expected_bytes"]
    assert later["host -> fake:1"] == links["host -> fake:1"]
    assert later["host -> fake:0"] > links["host -> fake:0"]
