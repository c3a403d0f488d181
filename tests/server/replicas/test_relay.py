"""A request whose replica is lost: tried again, or ended with an error of its API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from greenroom.server.http.errors import ApiError
from greenroom.server.http.streams import BEAT
from greenroom.server.page.assets import DATA
from greenroom.server.replicas.relay import LOST, TRIES, refused, relay
from greenroom.server.replicas.responses import joined, last_event, merged_metrics
from greenroom.server.web.calls import Call

HEAD = [(b"content-type", b"text/event-stream")]
CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat")


class Replicas:
    """Replicas that send what their scripts say; an exception in a script is raised."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts, self.failed, self.closed = iter(scripts), list[list[str]](), 0

    @asynccontextmanager
    async def ask(self, failed: list[str]) -> AsyncIterator[Any]:
        self.failed.append([*failed])
        script = next(self._scripts)

        async def parts() -> AsyncIterator[Any]:
            for each in script:
                if isinstance(each, Exception):
                    raise each
                yield each

        try:
            yield parts()
        finally:
            self.closed += 1

    def send(self, path: str = CHAT, leaving: str = "") -> tuple[int, list[bytes]]:
        async def read() -> list[Any]:
            call = Call("POST", path, [])
            return [each async for each in relay(call, self.ask, ConnectionError, leaving.__eq__)]

        (status, _), *parts = asyncio.run(read())
        assert self.closed == len(self.failed)
        return status, parts


def head(name: str = "a", status: int = 200) -> tuple[str, int, Any]:
    return name, status, HEAD


def test_an_answer_passes_unchanged() -> None:
    assert Replicas([head(), b"one", b"two"]).send() == (200, [b"one", b"two"])


@pytest.mark.parametrize("before", [[], [head()]])
def test_what_has_not_begun_is_tried_again(before: list[Any]) -> None:
    replicas = Replicas([*before, ConnectionError()], [head("b"), b"one"])
    assert replicas.send() == (200, [b"one"])
    assert replicas.failed == [[], ["a" if before else ""]]


def test_what_has_begun_ends_with_an_error() -> None:
    replicas = Replicas([head(), b"data: 1\n\n", ConnectionError()], [head(), b"again"])
    status, parts = replicas.send()
    assert (status, parts[0], len(parts)) == (200, b"data: 1\n\n", 2)
    assert json.loads(parts[1].removeprefix(b"data: "))["error"]["message"] == LOST
    assert len(replicas.failed) == 1


def test_a_page_leaves_a_replica_that_is_to_be_removed() -> None:
    frames = [head("a"), b"data: 1\n\n", b"data: 2\n\n"]
    assert Replicas(frames).send(DATA, leaving="a") == (200, [b"data: 1\n\n"])
    assert Replicas(frames).send(DATA, leaving="b") == (200, frames[1:])
    assert Replicas(frames).send(CHAT, leaving="a") == (200, frames[1:])  # an answer ends first


def test_frames_of_a_lost_replica_end_without_an_error() -> None:
    frames = [head("a"), b"data: 1\n\n"]
    assert Replicas([*frames, ConnectionError()]).send(DATA) == (200, frames[1:])


def test_a_sign_of_life_is_no_beginning() -> None:
    replicas = Replicas([head(), BEAT, ConnectionError()], [head(), b"data: 1\n\n"])
    assert replicas.send() == (200, [BEAT, b"data: 1\n\n"])


def test_a_replica_whose_model_has_failed_passes_requests_on() -> None:
    replicas = Replicas([head("a", 503), b"no"], [head("b"), b"yes"])
    assert replicas.send() == (200, [b"yes"])
    assert replicas.failed == [[], ["a"]]


def test_the_last_replica_says_why_it_is_not_available() -> None:
    scripts = [[head(str(number), 503), b"loading"] for number in range(TRIES)]
    assert Replicas(*scripts).send() == (503, [b"loading"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_refusal_after_a_sign_of_life_ends_the_stream_as_its_api_does(
    path: str, status: int
) -> None:
    """A client has the status 200 by then: it reads events, and no body of an error."""
    response = refused(path, ApiError(status, "its queue is full"))
    refusals = [[head(str(each), status), bytes(response.body)] for each in range(TRIES - 1)]
    replicas = Replicas([head(), BEAT, ConnectionError()], *refusals)
    last = last_event(path, ApiError(status, "its queue is full"), 0)
    assert replicas.send(path) == (200, [BEAT, last])
    assert b"its queue is full" in last
    assert replicas.failed == [[], ["a"], ["a", "0"]]


@pytest.mark.parametrize("path", PATHS)
def test_after_a_refusal_another_replica_may_answer(path: str) -> None:
    refusal = [head("b", 429), bytes(refused(path, ApiError(429, "its queue is full")).body)]
    answer = [head("c"), b"data: 1\n\n"]
    replicas = Replicas([head(), BEAT, ConnectionError()], refusal, answer)
    assert replicas.send(path) == (200, [BEAT, b"data: 1\n\n"])


def test_a_replica_that_is_lost_after_a_refusal_is_the_reason() -> None:
    refusal = [head("b", 429), bytes(refused(CHAT, ApiError(429, "its queue is full")).body)]
    replicas = Replicas([head(), BEAT, ConnectionError()], refusal, [ConnectionError()])
    status, (_, last) = replicas.send()
    assert (status, LOST.encode() in last) == (200, True)


def test_replicas_that_are_lost_one_after_another() -> None:
    status, parts = Replicas(*[[ConnectionError()]] * TRIES).send("/v1/messages")
    assert status == 502
    assert json.loads(b"".join(parts))["error"] == {"type": "api_error", "message": LOST}


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ValueError, match="a mistake"):
        Replicas([ValueError("a mistake")]).send()


def test_the_error_of_each_api() -> None:
    error = ApiError(502, "lost")
    events = {path: last_event(path, error, 7).decode() for path in PATHS}
    details = {"message": "lost", "type": "server_error", "param": None, "code": None}
    for path in (CHAT, "/v1/completions"):
        assert json.loads(events[path].removeprefix("data: ")) == {"error": details}
    assert events["/v1/messages"].startswith("event: error\ndata: ")
    assert events["/v1/responses"].startswith("event: error\ndata: ")
    assert json.loads(events["/v1/responses"].partition("data: ")[2]) == {
        "type": "error", "code": "server_error", "message": "lost", "param": None,
        "sequence_number": 7,
    }  # fmt: skip
    assert events["/api/chat"] == '{"error": "lost"}\n'


def test_metrics_of_all_replicas_have_their_names() -> None:
    page = b'# HELP x_total things\n# TYPE x_total counter\nx_total{kind="k"} %d.0\n'
    merged = merged_metrics([("a", page % 1), ("b", page % 2)]).decode().splitlines()
    assert merged == [
        "# HELP x_total things", "# TYPE x_total counter",
        'x_total{kind="k",replica="a"} 1.0', 'x_total{kind="k",replica="b"} 2.0',
    ]  # fmt: skip
    status, headers, body = joined("/metrics", [("a", 503, [], b""), ("b", 200, HEAD, page % 1)], 0)
    assert (status, body.count(b"replica=")) == (200, 1)
    assert dict(headers)[b"content-length"] == str(len(body)).encode()


def test_a_cancelled_request_is_found_where_it_runs() -> None:
    answers = [("a", 404, [], b"no"), ("b", 200, [], b"done"), ("c", 404, [], b"no")]
    status, _, body = joined("/v1/admin/cancel", answers, 0)
    assert (status, body) == (200, b"done")


@pytest.mark.parametrize("path", ["/v1/admin/cache", "/v1/admin/devices"])
def test_a_change_that_one_replica_refuses_has_failed(path: str) -> None:
    answers = [("a", 200, [], b'{"slots": 4}'), ("b", 429, [], b'{"error": {"message": "busy"}}')]
    status, _, body = joined(path, answers, 0)
    results = {
        "a": {"status": 200, "slots": 4}, "b": {"status": 429, "error": {"message": "busy"}}
    }  # fmt: skip
    assert (status, json.loads(body)) == (429, {"error": {"message": "busy"}, "replicas": results})
    status, _, body = joined(path, answers[:1], 0)
    assert (status, json.loads(body)["slots"]) == (200, 4)


def test_a_change_that_a_lost_replica_may_not_have_made_has_failed() -> None:
    status, headers, body = joined("/v1/admin/cache", [("a", 200, HEAD, b'{"slots": 4}')], 1)
    content = json.loads(body)
    assert (status, content["replicas"]) == (502, {"a": {"status": 200, "slots": 4}})
    assert "1 of 2 replicas did not answer" in content["error"]["message"]
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
