"""A Ray cluster of three nodes, and `python deploy/ray.py` as users start it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = (str(ROOT / "deploy" / "ray.py"),)
START_S, STOP_S = 120.0, 60.0
NODES = 3
LOST = "the replica that computed this answer was lost"
# The last part of a stream, by the path of its API.
ENDS = {
    "/v1/chat/completions": "data: [DONE]", "/v1/messages": '"type":"message_stop"',
    "/v1/responses": '"usage":{"input_tokens"', "/api/chat": '"done":true',
}  # fmt: skip


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster, in which each node is a process."""
    cluster_utils = pytest.importorskip(
        "ray.cluster_utils", reason="Ray is not installed: pip install 'greenroom[ray]'"
    )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(NODES - 1):
            started.add_node(num_cpus=1)
        yield started.address
    finally:
        started.shutdown()


class Deployment:
    """A running `deploy/ray.py`."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.client = httpx2.Client(base_url=url, timeout=STOP_S, headers={"x-api-key": key})

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return self.client.post(path, json={"model": "demo", **body})

    def names(self) -> set[str]:
        """The replicas that answer now."""
        found = self.metric("up")
        return {labels.split('replica="')[1].split('"')[0] for labels in found}

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric, by its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        rows = [line.rpartition(" ") for line in lines if line.startswith(f"greenroom_{name}{{")]
        return {labels: float(value) for labels, _, value in rows}

    def answers(self) -> Counter[str]:
        """How many answers each replica has completed."""
        counts = Counter[str]()
        for labels, value in self.metric("answers_total").items():
            counts[labels.split('replica="')[1].split('"')[0]] += int(value)
        return counts

    def wait_for(self, replicas: int) -> None:
        wait(lambda: len(self.names()) == replicas, f"{replicas} replicas")


def body(path: str, number: int, stream: bool = True, tokens: int = 150) -> dict[str, Any]:
    """A question in the format of an API."""
    question = [{"role": "user", "content": f"{number} soldiers came to the town, and"}]
    fields: dict[str, Any] = {
        "/v1/responses": {"input": question, "max_output_tokens": tokens},
        "/api/chat": {"messages": question, "options": {"num_predict": tokens}},
    }.get(path, {"messages": question, "max_tokens": tokens})
    return {"model": "demo", "stream": stream, **fields}


def wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.2)


def processes(kind: str = "Replica") -> list[psutil.Process]:
    """The processes of replicas (or of the gate: `Gate`), the oldest first."""
    found = []
    for each in psutil.process_iter(["cmdline", "create_time"]):
        if (each.info["cmdline"] or [""])[0].startswith(f"ray::ServeReplica:greenroom:{kind}"):
            found.append(each)
    return sorted(found, key=lambda each: each.info["create_time"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def deployed(
    cluster: str, folder: Path, *options: str, key: str = "", program: Sequence[str] = PROGRAM
) -> Iterator[Deployment]:
    """Run `deploy/ray.py` until its first replica answers; SIGTERM must end it without a trace."""
    environment = {**os.environ, "GREENROOM_API_KEY": key} if key else None
    port = free_port()
    command = [sys.executable, *program, "demo", "--address", cluster, "--port", str(port),
               "--batch-invariant", "--threads", "1", *options]  # fmt: skip
    log = folder / "ray.log"
    with log.open("wb") as output:
        program = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        running = Deployment(f"http://127.0.0.1:{port}", key)
        wait(lambda: b"is served at" in log.read_bytes() or program.poll() is not None, "the model")
        assert program.poll() is None, log.read_text()
        yield running
        program.send_signal(signal.SIGTERM)
        assert program.wait(STOP_S) == 0, log.read_text()
        assert processes() == []
    finally:
        program.terminate()  # after a failure: Serve of the cluster would stay for the next test
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(STOP_S)
        program.kill()
        program.wait()
