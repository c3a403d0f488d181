"""Chat backend over a remote server, by OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2

from greenroom.config import SamplingConfig
from greenroom.errors import GreenroomError, UsageError
from greenroom.interrupts import mark_handled
from greenroom.json_file import Malformed, parse
from greenroom.server.chat.backend import Messages, OnDelta, Reply
from greenroom.server.engine.tokens.reader import AnswerDelta

OPTIONS = ("temperature", "top_p", "top_k", "seed")
WAIT_S = httpx2.Timeout(600.0, connect=10.0)  # for a token; the first follows the entire prompt


class RemoteBackend:
    """Answers chat messages through a server, Greenroom's or another with OpenAI's API.

    `key` is the server's API key, if it needs one. `model` is by default the first model that the
    server lists. GreenroomError if the server cannot be reached.
    """

    def __init__(
        self, url: str, key: str | None, sampling: SamplingConfig, model: str | None = None
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: the URL must begin with http:// or https://")
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        self._client = httpx2.Client(base_url=base, headers=headers, timeout=WAIT_S)
        self._url, self._sampling = url, sampling
        try:
            self.model = model or self._first_model()
        except BaseException:
            self.close()
            raise

    def answer(self, messages: Messages, on_delta: OnDelta) -> Reply:
        reply, began, times = Reply(), time.monotonic(), []
        try:
            for event in self._events(messages):
                if delta := _delta(event):
                    times.append(time.monotonic())
                    reply.add(delta)
                    on_delta(delta)
                _note(event, reply)
        except KeyboardInterrupt as error:  # leaving the stream disconnects, and the server cancels
            mark_handled(error)
            reply.reason = "cancelled"
        if times:
            reply.ttft_s = times[0] - began
            if (count := (reply.new_tokens or len(times)) - 1) > 0 and times[-1] > times[0]:
                reply.tokens_per_s = count / (times[-1] - times[0])
        return reply

    def stats(self) -> dict[str, Any]:
        return self._json("GET", "/v1/stats")

    def resize(self, cache: str) -> int:
        slots = self._json("POST", "/v1/admin/cache", {"cache": cache}).get("slots")
        if type(slots) is not int:
            raise GreenroomError(f"{self._url}: the server does not say how many slots it has")
        return slots

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        models = self._json("GET", "/v1/models").get("data")
        if not (isinstance(models, list) and models and _text(_object(models[0]).get("id"))):
            raise GreenroomError(f"{self._url}: the server lists no models: name one as MODEL")
        return _text(models[0].get("id"))

    def _body(self, messages: Messages) -> dict[str, Any]:
        config = self._sampling
        options = {name: getattr(config, name) for name in OPTIONS}
        options["max_tokens"] = config.max_new_tokens
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in options.items() if value is not None},
        }

    def _events(self, messages: Messages) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json=self._body(messages)
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise self._refused(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = _parsed(line.removeprefix("data: "))
                    if "error" in event:
                        raise GreenroomError(f"{self._url}: {_message(event)}")
                    yield event
        except httpx2.HTTPError as error:
            raise self._broken(error) from error

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise self._broken(error) from error
        except httpx2.InvalidURL as error:
            raise UsageError(f"--url {self._url}: {error}") from error
        if response.status_code >= 400:
            raise self._refused(response)
        return _parsed(response.text)

    def _refused(self, response: httpx2.Response) -> GreenroomError:
        try:
            message = _message(parse(response.content, unique=False))
        except Malformed:
            message = f"HTTP {response.status_code}"
        return GreenroomError(f"{self._url}: {message}")

    def _broken(self, error: httpx2.HTTPError) -> GreenroomError:
        return GreenroomError(f"{self._url}: {error or type(error).__name__}")


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = parse(text)
    except Malformed as error:
        raise GreenroomError(f"the server sent invalid JSON: {text[:80]!r}") from error
    return value if isinstance(value, dict) else {}


def _message(body: Any) -> str:
    error = _object(body).get("error")
    text = str(error.get("message") if isinstance(error, dict) else error or body)[:500]
    return " ".join(text.split())


# Servers differ: a value of another type counts as if it were missing.


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [_object(each) for each in choices] if isinstance(choices, list) else []


def _delta(event: dict[str, Any]) -> AnswerDelta | None:
    """Return the text of a streamed chunk, if any."""
    for choice in _choices(event):
        delta = _object(choice.get("delta"))
        text = _text(delta.get("content"))
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        if text or reasoning:
            return AnswerDelta(text=text, reasoning=reasoning)
    return None


def _note(event: dict[str, Any], reply: Reply) -> None:
    """Copy the counts and times of a streamed chunk to the reply."""
    for choice in _choices(event):
        reply.reason = _text(choice.get("finish_reason")) or reply.reason
    if usage := _object(event.get("usage")):
        reply.prompt_tokens = _count(usage.get("prompt_tokens"))
        reply.new_tokens = _count(usage.get("completion_tokens"))
        details = _object(usage.get("prompt_tokens_details"))
        reply.reused_tokens = _count(details.get("cached_tokens"))
