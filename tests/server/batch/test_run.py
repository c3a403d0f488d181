"""Batches over a fake engine: every request gets one answer, whatever happens to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import ServeConfig
from greenroom.errors import GreenroomError
from greenroom.server.batch.requests import read_requests
from greenroom.server.batch.results import Results
from greenroom.server.batch.run import WAITING, BatchRun, LocalAnswerer, Tally
from greenroom.server.http.service import Service
from tests.server.batch.conftest import MODEL, line_of, lines_of, write
from tests.server.conftest import fake_engine
from tests.server.fakes import FakeEngine


class Batch:
    """A batch file, its results, and what the last run counted."""

    def __init__(self, folder: Path, lines: Sequence[Any]) -> None:
        self.source, self.out = write(folder / "in.jsonl", lines), folder / "out.jsonl"
        self.tally = Tally()
        self.answers = 0

    def run(self, engine: FakeEngine, max_batch: int = 2, max_queue: int = 8) -> BatchRun:
        self.tally, self.answers = Tally(), 0
        config = ServeConfig(max_batch=max_batch, max_queue=max_queue, no_page=True)
        service = Service(engine, config, MODEL, log=self.tally)  # type: ignore[arg-type]
        requests = read_requests(self.source, MODEL)

        def count() -> None:
            self.answers += 1

        try:
            with Results(self.out, requests) as results:
                run = BatchRun(LocalAnswerer(service), max_batch + WAITING, results, count)
                asyncio.run(run.run(self.source, requests))
        finally:
            service.close()
        return run

    @property
    def statuses(self) -> dict[str, int]:
        lines = lines_of(self.out)
        found = {each["custom_id"]: each["response"]["status_code"] for each in lines}
        assert len(found) == len(lines)
        return found


def test_each_request_has_one_answer(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(30)]
    batch = Batch(tmp_path, [line_of(each) for each in names])
    run = batch.run(fake_engine("Hello", reused=3))
    assert (run.refused, run.failed) == (0, [])
    assert batch.statuses == dict.fromkeys(names, 200)
    answer = lines_of(batch.out)[0]["response"]
    assert answer["request_id"].startswith("req_")
    assert answer["body"]["choices"][0]["message"]["content"] == "Hello"
    assert batch.answers == 30
    assert batch.tally.reused_tokens == 90
    assert batch.tally.new_tokens == 30 * answer["body"]["usage"]["completion_tokens"]


def test_every_api_is_there(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "Hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": user},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": user, "max_tokens": 9},
    }
    lines = [line_of(url, url=url, body={"model": MODEL} | body) for url, body in bodies.items()]
    batch = Batch(tmp_path, lines)
    batch.run(fake_engine("Hello"))
    assert batch.statuses == dict.fromkeys(bodies, 200)


def test_a_refused_request_is_an_answer(tmp_path: Path) -> None:
    wrong = line_of("wrong")
    wrong["body"]["temperature"] = "hot"
    batch = Batch(tmp_path, [line_of("a"), wrong, line_of("b")])
    assert batch.run(fake_engine("Hello")).refused == 1
    assert batch.statuses == {"a": 200, "wrong": 400, "b": 200}
    engine = fake_engine("Hello")
    batch.run(engine)
    assert engine.tickets == []


def test_a_failed_request_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line_of(each) for each in "abc"])
    engine = fake_engine("Hello")
    engine.failing = GreenroomError("an expert cannot be read")
    run = batch.run(engine)
    assert {name for name, _ in run.failed} == set("abc")
    assert "log has details" in run.failed[0][1]
    assert batch.out.read_bytes() == b""
    assert batch.run(fake_engine("Hello")).failed == []
    assert batch.statuses == dict.fromkeys("abc", 200)


def test_requests_wait_while_there_is_no_place(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(12)]
    batch = Batch(tmp_path, [line_of(each) for each in names])
    engine = fake_engine("Hello", places=1, delay_s=0.002)
    batch.run(engine, max_batch=4, max_queue=0)
    assert batch.statuses == dict.fromkeys(names, 200)


def test_a_request_that_never_has_a_place_is_refused(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line_of("a")])
    assert batch.run(fake_engine("Hello", places=0)).refused == 1
    assert batch.statuses == {"a": 429}


def test_no_more_requests_are_sent_than_can_be_prepared(tmp_path: Path) -> None:
    most, lock, running = 0, threading.Lock(), 0

    def script(request: Any) -> list[int]:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1
        return [5]

    batch = Batch(tmp_path, [line_of(str(number)) for number in range(20)])
    batch.run(FakeEngine(fake_engine("").tokenizer, script, end_ids=(1,)), max_batch=3)
    assert 3 <= most <= 3 + WAITING


def test_a_failed_model_ends_the_batch(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line_of(str(number)) for number in range(40)])
    engine = fake_engine("Hello", delay_s=0.001)

    def script(request: Any) -> list[int]:
        if len(engine.tickets) > 20:
            engine.now = ("failed", 1.0, "the memory is damaged")
        return [5, 6]

    engine.script = script
    with pytest.raises(GreenroomError, match="the memory is damaged"):
        batch.run(engine)
    answered = set(batch.statuses)
    assert 0 < len(answered) < 40
    again = fake_engine("Hello")
    batch.run(again)
    assert len(batch.statuses) == 40
    assert len(again.tickets) == 40 - len(answered)
