"""Responses of OpenAI's chat completions and completions: one object, or a stream of chunks."""

from __future__ import annotations

import time
from typing import Any

from greenroom.server.api.shared.usage import usage
from greenroom.server.engine.tokens.reader import AnswerEnd
from greenroom.server.http.answers import AnswerStream
from greenroom.server.http.endpoints import ResponseBuilder
from greenroom.server.http.errors import ApiError
from greenroom.server.http.route_helpers import new_id
from greenroom.server.http.service import Service
from greenroom.server.http.streams import DONE, event


class ChunkBuilder(ResponseBuilder):
    """Builds the common parts of OpenAI's chat completions and completions.

    `kind` and `chunk_kind` are the values of "object" in complete and streamed responses, `prefix`
    is the beginning of their ids, and `content_key` the key of a chunk's content.
    """

    prefix = kind = chunk_kind = content_key = ""

    def __init__(self, service: Service, body: Any, answers: AnswerStream) -> None:
        super().__init__(service, body, answers)
        self._ends: list[AnswerEnd] = []
        self._choices: list[dict[str, Any]] = []
        self._head = {
            "id": new_id(self.prefix),
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": self._model,
        }
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)

    def _chunk(
        self,
        index: int,
        content: Any,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Make a streamed chunk of one choice."""
        return {
            "index": index,
            self.content_key: content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _ended(self, index: int, end: AnswerEnd) -> str:
        """Record the end of a choice; return its finish reason."""
        self._ends.append(end)
        self._choices[index]["finish_reason"] = end.reason
        return end.reason

    def result(self) -> dict[str, Any]:
        return self._object(self._choices)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        used = usage(self._answers.prompt_tokens, self._ends)
        return {**self._head, "choices": choices, "usage": used}

    def event(self, data: dict[str, Any]) -> bytes:
        extra: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [data], **extra})

    def closing_events(self) -> bytes:
        """Return a stream's last events: the usage, if requested, and the end mark."""
        return (event(self._object([])) if self._with_usage else b"") + DONE

    def error_event(self, error: ApiError) -> bytes:
        return event(error.body("", ""))
