"""Who answers in the terminal chat: a model in this process (local.py), or a server (remote.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.server.engine.tokens.reader import AnswerDelta

Messages = list[dict[str, Any]]
OnDelta = Callable[[AnswerDelta], None]


@dataclass
class Reply:
    """What was said, and what it cost. Times in seconds, None where they are not known."""

    text: str = ""
    reasoning: str = ""
    reason: str = "stop"
    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    new_tokens: int | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    hit_ratio: float | None = None

    def add(self, delta: AnswerDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning


class ChatBackend(Protocol):
    """Who answers: a model in this process, or a server elsewhere."""

    def answer(self, messages: Messages, on_delta: OnDelta) -> Reply:
        """Until the answer ends, or a KeyboardInterrupt ends it: then `reason` is cancelled."""

    def stats(self) -> dict[str, Any]: ...

    def resize(self, cache: str) -> int: ...

    def close(self) -> None: ...
