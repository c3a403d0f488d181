"""A server whose answers have another form than Greenroom's, or are damaged."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from greenroom.config import SamplingConfig
from greenroom.errors import GreenroomError
from greenroom.server.chat.remote import RemoteBackend

HELLO = [{"role": "user", "content": "Hello"}]


def backend(body: bytes, status: int = 200) -> RemoteBackend:
    """A backend of a server whose every response has this body."""
    made = RemoteBackend("http://localhost", None, SamplingConfig(), "tiny")
    made.close()
    response = httpx2.MockTransport(lambda request: httpx2.Response(status, content=body))
    made._client = httpx2.Client(base_url="http://localhost", transport=response)
    return made


def stream(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [None, 5, {"delta": "x"}, {"delta": {"content": ["x"], "reasoning": 1}}]},
        {"choices": {"delta": {}}, "usage": [1]},
        {"choices": [{"delta": None, "finish_reason": {}}], "usage": {"prompt_tokens": "many"}},
        {"usage": {"prompt_tokens": 1, "prompt_tokens_details": [2], "completion_tokens": None}},
        [],
    ],
)  # fmt: skip
def test_values_of_other_types_count_as_missing(event: Any) -> None:
    texts: list[str] = []
    good = {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "length"}]}
    reply = backend(stream(event, good)).answer(HELLO, lambda delta: texts.append(delta.text))
    assert (reply.text, texts, reply.reason) == ("Hi", ["Hi"], "length")
    assert reply.new_tokens is None


def test_an_error_is_one_line() -> None:
    body = {"error": {"message": "line\nline"}}
    with pytest.raises(GreenroomError, match=r": line line$"):
        backend(json.dumps(body).encode(), 500).stats()
    with pytest.raises(GreenroomError, match=r": line line$"):
        backend(stream(body)).answer(HELLO, lambda delta: None)
    with pytest.raises(GreenroomError, match="HTTP 500"):
        backend(b"[" * 100_000, 500).stats()


@pytest.mark.parametrize("slots", [None, "5", [5]])
def test_a_resize_needs_the_number_of_slots(slots: Any) -> None:
    assert backend(b'{"slots": 5}').resize("50%") == 5
    with pytest.raises(GreenroomError, match="does not say how many slots"):
        backend(json.dumps({"slots": slots}).encode()).resize("50%")


@pytest.mark.parametrize("models", [None, [], [5], [{}], [{"id": 5}]])
def test_a_server_without_models_is_refused(models: Any) -> None:
    with pytest.raises(GreenroomError, match="lists no models"):
        backend(json.dumps({"data": models}).encode())._first_model()
