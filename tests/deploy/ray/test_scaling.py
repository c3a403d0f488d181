"""Replicas are added and removed while requests of all APIs run, streamed or not: none fails."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.ray.conftest import (
    ENDS,
    LOST,
    NODES,
    STOP_S,
    Deployment,
    body,
    deployed,
    processes,
    wait,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
OPTIONS = (
    "--replicas", f"1-{NODES}", "--target", "2", "--upscale-delay", "1", "--downscale-delay", "2",
    "--cache", "50%",
)  # fmt: skip
LONG = 600  # tokens; their experts are read for longer than it takes to remove a replica


def test_from_one_to_three_and_back_under_load(cluster: str, tmp_path: Path) -> None:
    many, ended = threading.Event(), threading.Event()
    outcomes: list[bool] = []

    def ask(client: int) -> None:
        """Send one request after another; most clients pause while there are few."""
        while not ended.is_set():
            if client and not many.wait(0.1):
                continue
            path, end = list(ENDS.items())[client % len(ENDS)]
            answer = running.post(path, body(path, client, client % 2 == 0, 30 + 8 * client))
            complete = end in answer.text if client % 2 == 0 else answer.text.endswith("}")
            outcomes.append(answer.status_code == 200 and LOST not in answer.text and complete)

    with deployed(cluster, tmp_path, *OPTIONS) as running, ThreadPoolExecutor(9) as pool:
        assert len(processes()) == 1
        clients = [pool.submit(ask, client) for client in range(9)]
        try:
            many.set()
            running.wait_for(NODES)
            before = len(outcomes)
            wait(lambda: len(outcomes) > before + 20, "answers of three replicas")
            many.clear()
            wait(lambda: len(processes()) == 1, "one replica")
            before = len(outcomes)
            wait(lambda: len(outcomes) > before + 5, "answers of one replica")
        finally:
            ended.set()
        for each in clients:
            each.result()
    assert all(outcomes)


class Page:
    """A live page in a thread, which asks again whenever its stream of frames ends."""

    def __init__(self, running: Deployment) -> None:
        self._client, self._closed = running.client, threading.Event()
        self.frames, self.streams, self.errors = 0, 0, list[str]()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        wait(lambda: self.frames > 0, "the first frame")

    def _watch(self) -> None:
        while not self._closed.is_set():
            with self._client.stream("GET", "/v1/live") as response:
                if response.status_code != 200:
                    self.errors.append(response.read().decode())
                self.streams += 1
                for line in response.iter_lines():
                    self.frames += line.startswith("data: {")
                    self.errors += [line] if '"error":' in line else []
                    if self._closed.is_set():
                        break

    def close(self) -> None:
        self._closed.set()
        self._thread.join(STOP_S)
        assert not self._thread.is_alive()


def long_text(running: Deployment, number: int, begun: threading.Event) -> str:
    """The text of a long stream, which must end with all of its tokens."""
    prompt = f"{number} soldiers of the king came to the town, and"
    fields = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": LONG}
    events = list[str]()
    with running.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as parts:
        assert parts.status_code == 200
        for line in parts.iter_lines():
            events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            begun.set()
    assert events.pop() == "[DONE]"
    choices = [json.loads(each)["choices"][0] for each in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(each["text"] for each in choices)


@pytest.mark.timeout(480)  # most of it reads that are throttled
def test_long_streams_outlive_the_removal_of_their_replica(cluster: str, tmp_path: Path) -> None:
    options = (*OPTIONS, "--target", "9", "--cache", "25%", "--read-limit", "20MB")
    numbers, ended = range(2 * NODES), threading.Event()

    def ask(client: int) -> None:
        while not ended.is_set():
            prompt = {"prompt": f"{client} ships", "max_tokens": 8}
            assert running.post("/v1/completions", prompt).status_code == 200

    with deployed(cluster, tmp_path, *options) as running, ThreadPoolExecutor(32) as pool:
        clients = [pool.submit(ask, client) for client in range(20)]
        pages, streams = [], []
        try:
            running.wait_for(NODES)
            pages += [Page(running) for _ in range(NODES)]
            ended.set()
            for each in clients:
                each.result()
            begun = [threading.Event() for _ in numbers]  # before a replica is removed: 2 s later
            streams += [pool.submit(long_text, running, each, begun[each]) for each in numbers]
            assert all(each.wait(STOP_S) for each in begun)
            assert min(running.metric("running_requests").values()) > 0  # on each replica
            running.wait_for(1)  # others get no more requests
            assert len(processes()) > 1  # at least one waits for its streams
            assert not any(each.done() for each in streams)
            texts = [each.result() for each in streams]
            wait(lambda: len(processes()) == 1, "the end of both")
            before = {page: page.frames for page in pages}
            wait(lambda: all(page.frames > before[page] for page in pages), "further frames")
        finally:
            ended.set()
            for page in pages:
                page.close()
        assert [each.errors for each in pages] == [[]] * NODES
        assert sum(each.streams for each in pages) > NODES  # some had to ask again
        alone = [pool.submit(long_text, running, each, threading.Event()) for each in numbers]
        assert texts == [each.result() for each in alone]
