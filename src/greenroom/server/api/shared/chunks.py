"""Answers of chat completions and completions: one object, or a chunk for each piece."""

from __future__ import annotations

import time
from typing import Any

from greenroom.server.api.shared.usage import usage
from greenroom.server.engine.tokens.reader import AnswerEnd
from greenroom.server.http.answers import AnswerStream
from greenroom.server.http.endpoints import ResponseBuilder
from greenroom.server.http.errors import ApiError
from greenroom.server.http.routes import new_id
from greenroom.server.http.service import Service
from greenroom.server.http.streams import DONE, event


class ChunkBuilder(ResponseBuilder):
    """The parts that both APIs have; `kind` is the object's, `prefix` its id's, and `says` where in
    a chunk its text is."""

    prefix = kind = chunk_kind = says = ""

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
        wanted = body.stream_options
        self._with_usage = wanted is not None and bool(wanted.include_usage)

    def _piece(
        self, index: int, said: Any, shown: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """A part of a choice; `shown` are its log-probabilities."""
        return {"index": index, self.says: said, "logprobs": shown, "finish_reason": reason}

    def _ended(self, index: int, end: AnswerEnd) -> str:
        """Note the end of a choice; why it ended."""
        self._ends.append(end)
        self._choices[index]["finish_reason"] = end.reason
        return end.reason

    def result(self) -> dict[str, Any]:
        return self._object(self._choices)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        used = usage(self._answers.prompt_tokens, self._ends)
        return {**self._head, "choices": choices, "usage": used}

    def event(self, data: dict[str, Any]) -> bytes:
        rest: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [data], **rest})

    def closing_events(self) -> bytes:
        """The end of the events, after the usage where it is wanted."""
        return (event(self._object([])) if self._with_usage else b"") + DONE

    def error_event(self, error: ApiError) -> bytes:
        return event(error.body("", ""))
