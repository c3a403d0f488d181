"""Responses of Ollama's chat and generate: lines of JSON, or one object."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from greenroom.hf.text.dialogue import ToolCall
from greenroom.server.api.shared.conversation import call_arguments
from greenroom.server.api.shared.usage import logprobs
from greenroom.server.engine.requests import Finished
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd
from greenroom.server.http.answers import AnswerStream
from greenroom.server.http.endpoints import ResponseBuilder
from greenroom.server.http.errors import OLLAMA_PATH, ApiError
from greenroom.server.http.route_helpers import new_id
from greenroom.server.http.service import Service


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def chat_content(text: str, **more: Any) -> dict[str, Any]:
    """Return the content of a chat response: a message with its text and further fields."""
    return {"message": {"role": "assistant", "content": text, **more}}


def generate_content(text: str, **more: Any) -> dict[str, Any]:
    """Return the content of a generate response: its text and further fields."""
    return {"response": text, **more}


def is_empty_line(data: bytes) -> bool:
    """Check whether a stream's line has no part of an answer, as during a silence."""
    try:
        line = json.loads(data)
    except ValueError:
        return False
    content = {name: line[name] for name in line if name not in ("model", "created_at")}
    empty = {"done": False}
    return content in ({**chat_content(""), **empty}, {**generate_content(""), **empty})


def durations(finished: Finished) -> dict[str, int]:
    """Return an answer's times in nanoseconds and its token counts, by Ollama's names.

    The model was loaded before the request came. The wait in the queue is a part of the total only.
    """
    first_s = finished.duration_s if finished.ttft_s is None else finished.ttft_s
    return {
        "total_duration": _ns(finished.duration_s),
        "load_duration": 0,
        "prompt_eval_count": finished.prompt_tokens,
        "prompt_eval_duration": _ns(first_s - finished.queued_s),
        "eval_count": finished.new_tokens,
        "eval_duration": _ns(finished.duration_s - first_s),
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class LineBuilder(ResponseBuilder):
    """Builds the common parts of Ollama's chat and generate responses."""

    media_type = "application/x-ndjson"
    content = staticmethod(generate_content)

    def __init__(self, service: Service, body: Any, answers: AnswerStream) -> None:
        super().__init__(service, body, answers)
        self._text = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {}

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        async for _, part in self._answers:
            if isinstance(part, AnswerEnd):
                reason = "length" if part.reason == "length" else "stop"
                self._end = {"done": True, "done_reason": reason, **durations(part.finished)}
                yield self._line("", {}, self._end)
            elif part.text or part.reasoning or part.call or (part.tokens and self._body.logprobs):
                yield self._add(part)

    def _add(self, part: AnswerDelta) -> dict[str, Any]:
        """Make the line of an answer's next part, and add the part to the answer."""
        more: dict[str, Any] = {}
        end: dict[str, Any] = {"done": False}
        self._text += part.text
        if part.reasoning:
            self._reasoning += part.reasoning
            more["thinking"] = part.reasoning
        if part.call:
            self._calls.append(_call(part.call, len(self._calls)))
            more["tool_calls"] = self._calls[-1:]
        if self._body.logprobs:
            end["logprobs"] = logprobs(self._answers.dialogue, part.tokens)
            self._logprobs += end["logprobs"]
        return self._line(part.text, more, end)

    def _line(self, text: str, more: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **self.content(text, **more), **end}

    def result(self) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": self._reasoning} if self._reasoning else {}
        more |= {"tool_calls": self._calls} if self._calls else {}
        end = {**self._end, "logprobs": self._logprobs} if self._body.logprobs else self._end
        return self._line(self._text, more, end)

    def event(self, data: dict[str, Any]) -> bytes:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def beat(self) -> bytes:
        """Return a line without text: clients of Ollama's API parse every line."""
        return self.event(self._line("", {}, {"done": False}))

    def error_event(self, error: ApiError) -> bytes:
        return self.event(error.body(OLLAMA_PATH, self._answers.request_id))


class OllamaChatBuilder(LineBuilder):
    """Builds responses of Ollama's chat."""

    content = staticmethod(chat_content)


class OllamaGenerateBuilder(LineBuilder):
    """Builds responses of Ollama's generate."""


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    arguments = call_arguments(call.arguments)
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": new_id("call_"), "function": function}
