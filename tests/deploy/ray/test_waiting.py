"""A replica that is killed while streams wait in its queue: another one answers them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.ray.conftest import ENDS, LOST, Deployment, body, deployed, processes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def ask(running: Deployment, path: str, number: int, begun: list[str]) -> str:
    text = ""
    with running.client.stream("POST", path, json=body(path, number)) as response:
        assert response.status_code == 200
        for part in response.iter_text():
            if not text:
                begun.append(path)
            text += part
    return text


def test_streams_in_a_lost_replicas_queue_are_answered(cluster: str, tmp_path: Path) -> None:
    options = ("--replicas", "2", "--max-batch", "1", "--memory", "1GiB")
    paths, begun = [*ENDS, *ENDS], list[str]()
    with deployed(cluster, tmp_path, *options) as running, ThreadPoolExecutor(len(paths)) as pool:
        running.wait_for(2)
        streams = [pool.submit(ask, running, path, i, begun) for i, path in enumerate(paths)]
        wait(lambda: sum(running.metric("queued_requests").values()) >= 4, "a queue")
        wait(lambda: len(begun) >= 2, "the first events")
        os.kill(processes()[0].pid, signal.SIGKILL)
        texts = [each.result() for each in streams]
    broken = [number for number, text in enumerate(texts) if LOST in text]
    assert len(broken) <= 1  # only one was computed there
    for path, text in zip(paths, texts, strict=True):
        assert LOST in text or ENDS[path] in text
        assert text.count("message_start") in (0, 2)  # the event's name, and its type
        assert text.count("response.created") in (0, 2)
