"""Interface of chat backends: a model in this process (local.py), or a server (remote.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.server.engine.tokens.reader import AnswerDelta

Messages = list[dict[str, Any]]
OnDelta = Callable[[AnswerDelta], None]


@dataclass
class Reply:
    """A chat backend's complete answer, with token counts and times in seconds.

    A count or time is None if the backend does not know it.
    """

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
    """Answers chat messages with a model in this process, or a remote server."""

    def answer(self, messages: Messages, on_delta: OnDelta) -> Reply:
        """Answer chat messages; `on_delta` gets each part of the answer as it comes.

        A KeyboardInterrupt ends the answer early: the Reply then has the `reason` "cancelled".
        """

    def stats(self) -> dict[str, Any]: ...

    def resize(self, cache: str) -> int: ...

    def close(self) -> None: ...
