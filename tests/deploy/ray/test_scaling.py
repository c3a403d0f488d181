"""Replicas are added and removed while requests of all APIs run, streamed or not: none fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.ray.conftest import ENDS, LOST, NODES, body, deployed, processes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
OPTIONS = (
    "--replicas", f"1-{NODES}", "--target", "2", "--upscale-delay", "1", "--downscale-delay", "2",
    "--cache", "50%",
)  # fmt: skip


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
