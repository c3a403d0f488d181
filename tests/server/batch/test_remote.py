"""A batch whose requests a running server answers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx2
import pytest

from greenroom.errors import GreenroomError, UsageError
from greenroom.server.batch import remote
from greenroom.server.batch.remote import RemoteAnswerer
from greenroom.server.batch.requests import read_requests
from greenroom.server.batch.results import Results
from greenroom.server.batch.run import BatchRun, _message
from greenroom.server.web.calls import Response
from tests.server.batch.conftest import MODEL, line_of, lines_of, write
from tests.server.conftest import Serve, fake_engine

NAMES = [f"r{number}" for number in range(12)]


def run(folder: Path, url: str, key: str | None = None) -> BatchRun:
    source = write(folder / "in.jsonl", [line_of(each) for each in NAMES])
    requests = read_requests(source, MODEL)
    answerer = RemoteAnswerer(url, key)
    answerer.check_model(MODEL)
    with Results(folder / "out.jsonl", requests) as results:
        batch = BatchRun(answerer, 8, results, lambda: None)
        asyncio.run(batch.run(source, requests))
    return batch


def statuses(folder: Path) -> dict[str, int]:
    lines = lines_of(folder / "out.jsonl")
    found = {each["custom_id"]: each["response"]["status_code"] for each in lines}
    assert len(found) == len(lines)
    return found


def test_every_request_has_one_answer(serve: Serve, tmp_path: Path) -> None:
    server = serve(fake_engine("Hello"), key="secret")
    batch = run(tmp_path, f"{server.url}/v1/", "secret")
    assert (batch.refused, batch.failed) == (0, [])
    assert statuses(tmp_path) == dict.fromkeys(NAMES, 200)
    line = lines_of(tmp_path / "out.jsonl")[0]["response"]
    assert line["request_id"].startswith("req_")
    assert line["body"]["choices"][0]["message"]["content"] == "Hello"


def test_requests_wait_while_the_server_has_no_place(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AGAIN_S", 0.005)
    server = serve(fake_engine("Hello", places=1, delay_s=0.002), max_batch=1, max_queue=0)
    assert run(tmp_path, server.url).failed == []
    assert statuses(tmp_path) == dict.fromkeys(NAMES, 200)
    assert any(" 429 " in each for each in server.lines)


def test_a_lost_connection_is_made_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends in the middle of answers; another one takes its port."""
    monkeypatch.setattr(remote, "AGAIN_S", 0.01)
    first = serve(fake_engine("Hello", delay_s=5.0), grace=0.0)
    check = RemoteAnswerer.check_model

    def check_and_replace(answerer: RemoteAnswerer, name: str) -> None:
        check(answerer, name)
        first.stop()
        serve(fake_engine("Hello"), port=first.port)

    monkeypatch.setattr(RemoteAnswerer, "check_model", check_and_replace)
    assert run(tmp_path, first.url).failed == []
    assert statuses(tmp_path) == dict.fromkeys(NAMES, 200)


def test_failures_have_no_line(serve: Serve, tmp_path: Path) -> None:
    engine = fake_engine("Hello")
    engine.failing = GreenroomError("an expert cannot be read")
    batch = run(tmp_path, serve(engine).url)
    assert {name for name, _ in batch.failed} == {*NAMES}
    assert statuses(tmp_path) == {}


def test_a_server_that_stays_unreachable_ends_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AGAIN_S", 0.01)
    monkeypatch.setattr(remote, "WAIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(GreenroomError, match=url):
        run(tmp_path, url)
    monkeypatch.setattr(RemoteAnswerer, "check_model", lambda answerer, name: None)
    with pytest.raises(GreenroomError, match=url):
        run(tmp_path, url)
    assert statuses(tmp_path) == {}


def test_a_wrong_server_is_named(serve: Serve) -> None:
    with pytest.raises(UsageError, match="must begin with http"):
        RemoteAnswerer("localhost:8000", None)
    url = serve(fake_engine("Hello")).url
    with pytest.raises(GreenroomError, match="has no model 'other' for this batch: HTTP 404"):
        RemoteAnswerer(url, None).check_model("other")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": "\\ud800"}', b'{"a": NaN}', b"\xff"])
def test_an_answer_that_is_no_json_is_kept_as_text(tmp_path: Path, body: bytes) -> None:
    source = write(tmp_path / "in.jsonl", [line_of("r0")])
    requests, answerer = read_requests(source, MODEL), RemoteAnswerer("http://localhost", None)
    answerer._client = httpx2.AsyncClient(
        base_url="http://localhost",
        transport=httpx2.MockTransport(lambda request: httpx2.Response(200, content=body)),
    )
    with Results(tmp_path / "out.jsonl", requests) as results:
        asyncio.run(BatchRun(answerer, 1, results, lambda: None).run(source, requests))
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert line["response"]["body"] == body.decode(errors="replace")


def test_a_failure_is_one_line() -> None:
    assert _message(Response(500, "", {"error": {"message": "a\nb"}})) == "a b"
    assert _message(Response(502, "", "")) == "HTTP 502"
