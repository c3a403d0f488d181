"""Replicas are added and removed while requests run: none fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.ray.conftest import NODES, deployed, processes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
OPTIONS = (
    "--replicas", f"1-{NODES}", "--target", "2", "--upscale-delay", "1", "--downscale-delay", "2",
    "--cache", "50%",
)  # fmt: skip


def test_from_one_to_three_and_back_under_load(cluster: str, tmp_path: Path) -> None:
    many, ended = threading.Event(), threading.Event()
    outcomes: list[tuple[int, int]] = []

    def ask(client: int) -> None:
        """Send one request after another; most clients pause while there are few."""
        while not ended.is_set():
            if client and not many.wait(0.1):
                continue
            body = {"prompt": f"The {client} birds", "max_tokens": 60, "temperature": 0}
            answer = running.post("/v1/completions", body)
            outcomes.append((client, answer.status_code))

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
    assert {status for _, status in outcomes} == {200}
