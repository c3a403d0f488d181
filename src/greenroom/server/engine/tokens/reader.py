"""Converts an answer's tokens to text, reasoning and tool calls, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from greenroom.server.engine.requests import Finished, Token

if TYPE_CHECKING:  # the chat with a remote server needs no transformers
    from greenroom.hf.text.dialogue import ReplyPart, ToolCall


class ReplyDecoder(Protocol):
    """Interface: turns an answer's tokens into text, reasoning and tool calls.

    `Dialogue.reply_parser` makes the implementation for a model.
    """

    def feed(self, token_id: int) -> list[ReplyPart]: ...

    def end(self) -> list[ReplyPart]: ...


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The next part of an answer: its text, reasoning or tool call, and its tokens.

    `prompt` has the prompt's tokens if their log-probabilities were requested.
    """

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()  # only in the first part


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer: why the answer ended, and its stop string.

    `reason` is stop, length or tool_calls. For an answer that was cancelled, ran out of time or
    failed, it is the reason in the engine's event `finished`. `stop` is the stop string that
    ended the answer, if one did.
    """

    reason: str
    stop: str | None
    finished: Finished
    reasoning_tokens: int = 0


class AnswerReader:
    """Converts one answer's tokens to the parts that clients get.

    `stops` are stop strings, and `end_ids` tokens that are not part of the answer. With `one_call`
    the first tool call ends the answer. Once `stopped` is true, further tokens are ignored.
    """

    def __init__(
        self,
        speaker: ReplyDecoder,
        stops: Sequence[str] = (),
        end_ids: Sequence[int] = (),
        one_call: bool = False,
    ) -> None:
        self._speaker, self._stops = speaker, StopMatcher(stops)
        self._end_ids, self._one_call = frozenset(end_ids), one_call
        self._waiting: list[tuple[Token, int]] = []  # each with its offset in the text
        self._length = self._shown = 0  # characters of text
        self._calls = self._reasoning_tokens = 0
        self._stop: str | None = None
        self.stopped = False

    def feed(self, token: Token) -> list[AnswerDelta]:
        """Return the parts of an answer that its next token completes."""
        if self.stopped:
            return []
        if token.id not in self._end_ids:
            self._waiting.append((token, self._length))
        return self._deltas(self._speaker.feed(token.id))

    def end(self, finished: Finished) -> tuple[list[AnswerDelta], AnswerEnd]:
        """Return the parts of an answer that were held back, and the answer's end."""
        deltas = [] if self.stopped else self._deltas(self._speaker.end())
        if not self.stopped:
            deltas += self._show(self._stops.flush())
            if self._waiting:  # tokens without text of their own
                tokens, self._waiting = tuple(token for token, _ in self._waiting), []
                deltas.append(AnswerDelta(tokens=tokens))
        reason = "stop" if self.stopped else finished.reason
        if reason == "stopping":  # the only end by the server that clients know
            reason = "length"
        if self._calls and reason == "stop":
            reason = "tool_calls"
        return deltas, AnswerEnd(reason, self._stop, finished, self._reasoning_tokens)

    def _deltas(self, parts: list[ReplyPart]) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        for part in parts:
            if self.stopped:
                break
            if part.text:
                deltas += self._read(part.text)
                continue
            deltas += self._show(self._stops.flush())  # a stop string is within one text
            self._calls += part.call is not None
            self._reasoning_tokens += bool(part.reasoning)
            deltas.append(self._with_tokens(AnswerDelta(reasoning=part.reasoning, call=part.call)))
            self.stopped = self._one_call and part.call is not None
        return deltas

    def _read(self, text: str) -> list[AnswerDelta]:
        self._length += len(text)
        text, self._stop = self._stops.feed(text)
        if self._stop is not None:
            self.stopped = True
            cut = self._shown + len(text)
            self._waiting = [(token, start) for token, start in self._waiting if start < cut]
        return self._show(text)

    def _show(self, text: str) -> list[AnswerDelta]:
        self._shown += len(text)
        return [self._with_tokens(AnswerDelta(text))] if text else []

    def _with_tokens(self, delta: AnswerDelta) -> AnswerDelta:
        tokens, self._waiting = tuple(token for token, _ in self._waiting), []
        return replace(delta, tokens=tokens)


class StopMatcher:
    """Finds stop strings in a streamed text; no part of a stop string is shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop string after it or None.

        Text that could begin a stop string is held back until further text decides.
        """
        text = self._pending + text
        matches = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if matches:
            at, _, stop = min(matches)
            self._pending = ""
            return text[:at], stop
        partial = max((partial_match(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - partial :]
        return text[: len(text) - partial], None

    def flush(self) -> str:
        """Return the text that was held back as the possible beginning of a stop string."""
        text, self._pending = self._pending, ""
        return text


def partial_match(text: str, stop: str) -> int:
    """Return the length of the longest text suffix that is a proper prefix of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def end_ids(model: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that end a model's answers."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
