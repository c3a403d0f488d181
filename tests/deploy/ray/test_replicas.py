"""Three replicas: every route, conversations, a replica that is killed, a client that leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.deploy.ray.conftest import LOST, NODES, Deployment, deployed, processes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
TOKENS = 200
BUDGET = 1 << 30


@pytest.fixture(scope="module")
def three(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("three")
    with deployed(cluster, folder, "--replicas", str(NODES), "--memory", f"{BUDGET}") as running:
        yield running


def prompt(number: int) -> dict[str, Any]:
    """A request whose answer has TOKENS tokens: the end of the text is improbable."""
    return {
        "prompt": f"{number} soldiers of the king came to the town, and", "temperature": 0,
        "max_tokens": TOKENS, "seed": 1, "stop": None,
    }  # fmt: skip


def stream(running: Deployment, number: int, begun: threading.Event) -> tuple[str, list[Any]]:
    """The text of a streamed answer, and its errors."""
    text, errors = "", []
    body = {"model": "demo", "stream": True, **prompt(number)}
    with running.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                errors += [event["error"]["message"]] if "error" in event else []
                text += "".join(each["text"] for each in event.get("choices", ()))
                begun.set()
    return text, errors


def test_every_api_answers_and_metrics_have_all_replicas(three: Deployment) -> None:
    three.wait_for(NODES)
    user = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": user}, "/v1/completions": {"prompt": "Once"},
        "/v1/responses": {"input": "Hello"}, "/v1/messages": {"messages": user, "max_tokens": 8},
        "/api/chat": {"messages": user}, "/api/generate": {"prompt": "Once"},
    }  # fmt: skip
    for path, body in bodies.items():
        whole, parts = (three.post(path, {**body, "stream": each}) for each in (False, True))
        assert (whole.status_code, parts.status_code) == (200, 200), whole.text
        assert whole.json()
        kind = "application/x-ndjson" if path.startswith("/api") else "text/event-stream"
        assert parts.headers["content-type"].startswith(kind)
        assert '"error":{' not in parts.text
    for path in ("/health", "/v1/models", "/v1/models/demo", "/api/tags", "/v1/stats", "/"):
        assert three.client.get(path).status_code == 200
    assert three.client.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert three.post("/v1/admin/cache", {"cache": "50%"}).status_code == 403  # needs a key
    large = three.post("/v1/messages", {"messages": [{"role": "user", "content": "x" * 5_000_000}]})
    assert (large.status_code, large.json()["type"]) == (413, "error")


def test_a_conversation_stays_with_the_replica_that_has_computed_it(three: Deployment) -> None:
    three.wait_for(NODES)
    chosen = []
    for number in range(6):
        before = three.answers()
        messages = [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": f"{number} " + "birds and foxes " * 200},
        ]
        for turn in range(3):
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            answer = three.post("/v1/chat/completions", body).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 512 or turn == 0  # --batch-invariant reuses complete chunks
            text = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "And then?"})
        after = three.answers()
        (replica,) = (name for name in after if after[name] > before[name])
        assert after[replica] == before[replica] + 3
        chosen.append(replica)
    assert len(set(chosen[:NODES])) == NODES  # new conversations go to idle replicas in turn


def test_a_killed_replica_ends_its_own_streams_alone(three: Deployment) -> None:
    three.wait_for(NODES)
    numbers = range(9)
    expected = [three.post("/v1/completions", prompt(each)).json() for each in numbers]
    assert [each["usage"]["completion_tokens"] for each in expected] == [TOKENS] * 9
    texts = [each["choices"][0]["text"] for each in expected]
    events = [threading.Event() for _ in numbers]
    with ThreadPoolExecutor(9) as pool:
        answers = [pool.submit(stream, three, each, events[each]) for each in numbers]
        assert all(each.wait(60) for each in events)
        os.kill(processes()[0].pid, signal.SIGKILL)
        found = [each.result() for each in answers]
    broken = [number for number in numbers if found[number][1]]
    assert len(broken) == 3  # the least loaded replica has got each request
    for number in numbers:
        text, errors = found[number]
        if number in broken:
            assert len(errors) == 1
            assert errors[0].startswith(LOST)
            assert texts[number].startswith(text)
        else:
            assert text == texts[number]
    three.wait_for(NODES)


def test_answers_that_had_not_begun_are_computed_by_another_replica(three: Deployment) -> None:
    three.wait_for(NODES)
    numbers = range(6)
    expected = [three.post("/v1/completions", prompt(each)).json() for each in numbers]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(three.post, "/v1/completions", prompt(each)) for each in numbers]
        wait(lambda: sum(three.metric("running_requests").values()) == 6, "six requests")
        victim = processes()[0]
        os.kill(victim.pid, signal.SIGKILL)
        found = [each.result() for each in answers]
    assert [each.status_code for each in found] == [200] * 6
    assert [each.json()["choices"] for each in found] == [each["choices"] for each in expected]
    three.wait_for(NODES)


def test_a_client_that_leaves_frees_its_place(three: Deployment) -> None:
    three.wait_for(NODES)
    body = {"model": "demo", "stream": True, **prompt(1)}
    with three.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(three.metric("running_requests").values()) == 1
    began = time.monotonic()
    wait(lambda: sum(three.metric("running_requests").values()) == 0, "the place")
    ended = three.metric("answers_total").items()
    assert sum(count for labels, count in ended if "cancelled" in labels) == 1
    assert time.monotonic() - began < 5


def test_a_batch_loses_nothing_when_a_replica_is_killed(three: Deployment, tmp_path: Path) -> None:
    three.wait_for(NODES)
    source, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    names = [f"r{number}" for number in range(48)]
    with source.open("w") as file:
        for number, name in enumerate(names):
            body = {"model": "demo", **prompt(number), "max_tokens": 40}
            line = {"custom_id": name, "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "greenroom", "batch", "demo", str(source), "-o", str(out),
               "--url", three.url, "--max-batch", "24"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as batch:
        wait(lambda: out.exists() and out.read_bytes().count(b"\n") >= 8, "the first answers")
        os.kill(processes()[0].pid, signal.SIGKILL)
        printed, _ = batch.communicate(timeout=100)
    assert batch.returncode == 0, printed.decode()
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in lines) == sorted(names)
    assert {each["response"]["status_code"] for each in lines} == {200}
    three.wait_for(NODES)


def test_replicas_have_nodes_and_budgets_of_their_own(three: Deployment) -> None:
    three.wait_for(NODES)
    found = processes()
    assert len({each.ppid() for each in found}) == len(found) == NODES  # a node is a process
    assert all(each.memory_info().rss <= BUDGET for each in found)


def test_a_gate_that_dies_is_started_again(three: Deployment) -> None:
    def answers() -> bool:
        try:
            return three.post("/v1/completions", prompt(1)).status_code == 200
        except httpx2.TransportError:
            return False

    three.wait_for(NODES)
    replicas, (gate,) = three.names(), processes("Gate")
    gate.kill()
    wait(lambda: not gate.is_running() and answers(), "another gate")
    assert three.names() == replicas
