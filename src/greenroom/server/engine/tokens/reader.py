"""One answer, from tokens to what a client sees: whole characters, stop strings, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from greenroom.server.engine.requests import Finished, Token

if TYPE_CHECKING:  # who talks to a server elsewhere needs no transformers
    from greenroom.hf.text.dialogue import ReplyPart, ToolCall


class ReplyDecoder(Protocol):
    """What turns tokens into text, reasoning and calls: see `Dialogue.reply_parser`."""

    def feed(self, token_id: int) -> list[ReplyPart]: ...

    def end(self) -> list[ReplyPart]: ...


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What comes next of an answer, and the tokens that it was made of."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()  # with log-probabilities, before all else, where they are wanted


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """`reason`: stop, length, or tool_calls; `stop` is the stop string that ended it, if any."""

    reason: str
    stop: str | None
    finished: Finished
    reasoning_tokens: int = 0


class AnswerReader:
    """Reads one answer. Once `stopped`, nothing more of it is wanted."""

    def __init__(
        self,
        speaker: ReplyDecoder,
        stops: Sequence[str] = (),
        end_ids: Sequence[int] = (),
        one_call: bool = False,
    ) -> None:
        self._speaker, self._stops = speaker, StopMatcher(stops)
        self._end_ids, self._one_call = frozenset(end_ids), one_call
        self._waiting: list[tuple[Token, int]] = []  # and where in the text each begins
        self._seen = self._shown = 0  # characters of text
        self._calls = self._reasoning_tokens = 0
        self._stop: str | None = None
        self.stopped = False

    def feed(self, token: Token) -> list[AnswerDelta]:
        """What this token adds. A token that ends the answer says nothing."""
        if self.stopped:
            return []
        if token.id not in self._end_ids:
            self._waiting.append((token, self._seen))
        return self._deltas(self._speaker.feed(token.id))

    def end(self, finished: Finished) -> tuple[list[AnswerDelta], AnswerEnd]:
        """What was held back, and how the answer ended."""
        deltas = [] if self.stopped else self._deltas(self._speaker.end())
        if not self.stopped:
            deltas += self._show(self._stops.rest())
            if self._waiting:  # tokens without text of their own
                tokens, self._waiting = tuple(token for token, _ in self._waiting), []
                deltas.append(AnswerDelta(tokens=tokens))
        reason = "stop" if self.stopped else finished.reason
        if reason == "stopping":  # clients know of no other end that the server chose
            reason = "length"
        if self._calls and reason == "stop":
            reason = "tool_calls"
        return deltas, AnswerEnd(reason, self._stop, finished, self._reasoning_tokens)

    def _deltas(self, said: list[ReplyPart]) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        for part in said:
            if self.stopped:
                break
            if part.text:
                deltas += self._read(part.text)
                continue
            deltas += self._show(self._stops.rest())  # a stop string is within one text
            self._calls += part.call is not None
            self._reasoning_tokens += bool(part.reasoning)
            deltas.append(self._with_tokens(AnswerDelta(reasoning=part.reasoning, call=part.call)))
            self.stopped = self._one_call and part.call is not None
        return deltas

    def _read(self, text: str) -> list[AnswerDelta]:
        self._seen += len(text)
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
    """Finds stop strings in a text that comes in parts; none of them is ever let through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What may be shown, and the stop string that was found after it."""
        text = self._held + text
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, _, stop = min(found)
            self._held = ""
            return text[:at], stop
        held = max((begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def rest(self) -> str:
        """What was held back in case a stop string came of it."""
        text, self._held = self._held, ""
        return text


def begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of this string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
