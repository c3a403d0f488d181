"""Answers of chat completions and completions: one object, or a chunk for each piece."""

from __future__ import annotations

import time
from typing import Any

from greenroom.server.api.shared.usage import FINISH, usage
from greenroom.server.engine.tokens.reader import End
from greenroom.server.http.answers import Answers
from greenroom.server.http.errors import ApiError
from greenroom.server.http.routes import new_id
from greenroom.server.http.service import Service
from greenroom.server.http.streams import DONE, event


class Chunks:
    """The parts that both APIs have; `kind` is the object's, `prefix` its id's."""

    prefix = kind = chunk_kind = ""

    def __init__(self, service: Service, body: Any, answers: Answers) -> None:
        self._body, self._answers = body, answers
        self._ends: list[End] = []
        self._head = {
            "id": new_id(self.prefix),
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": service.name,
        }
        wanted = body.stream_options
        self._with_usage = wanted is not None and bool(wanted.include_usage)

    def _ended(self, end: End) -> str:
        """Note an answer's end; why it ended."""
        self._ends.append(end)
        return FINISH[end.reason]

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        used = usage(self._answers.prompt_tokens, self._ends)
        return {**self._head, "choices": choices, "usage": used}

    def _event(self, choice: dict[str, Any]) -> bytes:
        rest: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [choice], **rest})

    def _closing(self) -> bytes:
        """The end of the events, after the usage where it is wanted."""
        return (event(self._object([])) if self._with_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body("", ""))
