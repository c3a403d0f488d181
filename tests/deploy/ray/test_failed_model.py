"""A replica whose model fails: others answer, and its health check replaces it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.deploy.ray.conftest import Deployment, deployed, processes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
TOKENS = 60
CLIENTS = 4


def ask(running: Deployment, number: int) -> tuple[int, str]:
    """The status and the text of an answer that is not streamed."""
    prompt = f"{number} soldiers of the king came to the town, and"
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    answer = running.post("/v1/completions", body)
    return answer.status_code, "".join(each["text"] for each in answer.json().get("choices", ()))


def test_a_failed_model_is_replaced_and_no_request_fails(cluster: str, tmp_path: Path) -> None:
    flag = tmp_path / "fail"
    program = ("-m", "tests.deploy.ray.failing", str(flag))
    options = ("--replicas", "2", "--memory", "1GiB")
    with (
        deployed(cluster, tmp_path, *options, program=program) as running,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        running.wait_for(2)
        expected = [ask(running, number) for number in range(CLIENTS)]
        assert {status for status, _ in expected} == {200}
        first, ended = {each.pid for each in processes()}, threading.Event()

        def ask_again(number: int) -> int:
            """Ask until the replica is replaced; how many answers came."""
            answers = 0
            while not ended.is_set():
                assert ask(running, number) == expected[number]
                answers += 1
            return answers

        asked = [pool.submit(ask_again, number) for number in range(CLIENTS)]
        try:
            flag.touch()
            wait(lambda: not flag.exists(), "the failure")
            wait(lambda: len({each.pid for each in processes()} - first) == 1, "a new replica")
            wait(lambda: len(running.names()) == 2 and len(processes()) == 2, "two replicas")
            before, others = running.answers(), count(CLIENTS)

            def both_answer() -> bool:
                """Conversations of both, since the clients' ones stay where they are."""
                assert ask(running, next(others))[0] == 200
                return all(running.answers()[name] > before[name] for name in before)

            wait(both_answer, "answers of both")
        finally:
            ended.set()
        assert all(each.result() for each in asked)
        assert len({each.pid for each in processes()} & first) == 1  # the other one has stayed
