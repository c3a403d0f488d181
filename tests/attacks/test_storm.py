"""Hostile clients beside a good one: neither its first token nor the budget suffers."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle, islice

import httpx2
import psutil
import pytest

from tests.attacks.attacks import ASKED, hostile_requests
from tests.cli.test_serve import served

HOSTILE_REQUESTS = 50
MEMORY = 880 << 20  # a little over the least that the demo model can be served with


def first_token_s(client: httpx2.Client, url: str, pid: int) -> float:
    """What the server computes, in seconds of all its processors, until the first token: on a
    machine for itself it takes no longer, and other programs do not count."""
    body = {"model": "demo", "messages": ASKED, "max_tokens": 4, "stream": True, "temperature": 0}
    began = computed_s(pid)
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return computed_s(pid) - began
    raise AssertionError("no token came")


def computed_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Memory of a process and its children, ten times a second."""
    process, done, seen = psutil.Process(pid), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.1):
            with suppress(psutil.Error):
                both = [process, *process.children(recursive=True)]
                seen.append(sum(each.memory_info().rss for each in both))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_storm_of_hostile_clients_neither_delays_a_good_one_nor_exceeds_the_budget() -> None:
    options = ("--memory", MEMORY, "--context", 256, "--max-batch", 16, "--timeout", 60)
    with (
        served(*options, cache=()) as (process, url, _),
        watched(process.pid) as memory,
        httpx2.Client(timeout=100) as client,
        ThreadPoolExecutor(10) as threads,
    ):
        alone = statistics.median(first_token_s(client, url, process.pid) for _ in range(7))

        def send(request: tuple[str, bytes]) -> int:
            path, body = request
            head = {"content-type": "application/json"}
            with suppress(httpx2.HTTPError):  # a connection may be closed on the way
                return httpx2.post(
                    f"{url}/v1/{path}", content=body, headers=head, timeout=100
                ).status_code
            return 0

        requests = [(path, json.dumps(body).encode()) for path, body in hostile_requests()]
        storm = [threads.submit(send, each) for each in islice(cycle(requests), HOSTILE_REQUESTS)]
        during = []
        while not all(each.done() for each in storm):
            during.append(first_token_s(client, url, process.pid))
        statuses = [each.result() for each in storm]
        assert set(statuses) <= {0, 200, 400, 413, 429, 503, 504}, statuses
        assert process.poll() is None
        assert httpx2.get(f"{url}/health").json() == {"status": "ready"}
        assert first_token_s(client, url, process.pid) < alone + 1
        said = f"alone {alone:.2f} s, then {during}; {max(memory) >> 20} MiB; {statuses}"
        assert max(memory) <= MEMORY, said
        assert max(during) < alone + 1, said
