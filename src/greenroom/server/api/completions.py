"""OpenAI's completions of text: POST /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, model_validator

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.shared.chunks import ChunkBuilder
from greenroom.server.api.shared.usage import finite
from greenroom.server.engine.requests import Token
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd
from greenroom.server.http.answers import Job
from greenroom.server.http.endpoints import route
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import CompletionParams
from greenroom.server.http.service import Service

DEFAULT_TOKENS = 16  # OpenAI's
MOST_PROMPTS = 128
SOME = Field(min_length=1)
Ids = Annotated[list[Annotated[int, Field(ge=0)]], SOME]


def _prompts(value: Any) -> Any:
    """Validate a prompt: a text, a list of texts, token ids, or lists of these."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("prompt must be a text, token ids, or a list of either")
    if _are_ids(value):
        return (tuple(value),)
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"prompt has too many items: at most {MOST_PROMPTS}")
    if all(isinstance(one, str) for one in value):
        return tuple(value)
    if all(isinstance(one, list) and one and _are_ids(one) for one in value):
        return tuple(map(tuple, value))
    raise ValueError("prompt must be a text, token ids, or a list of either")


def _are_ids(value: list[Any]) -> bool:
    return all(type(one) is int for one in value)


Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(
        _prompts,
        json_schema_input_type=str | Annotated[list[str], SOME] | Ids | Annotated[list[Ids], SOME],
    ),
]


class CompletionRequest(CompletionParams):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = DEFAULT_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported: leave it out, or send the same value as n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo: true")
        return self

    def job(self, dialogue: Dialogue) -> Job:
        return Job(
            prompts=tuple(_ids(prompt, dialogue) for prompt in self.prompt),
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=self.max_tokens,
            stops=self.stop or (),
            top_logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            plain=True,
        )


def _ids(prompt: str | tuple[int, ...], dialogue: Dialogue) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = tuple(dialogue.encode(prompt))
        if not ids:
            raise ApiError(400, "prompt is empty", param="prompt")
        return ids
    if not all(0 <= one < dialogue.vocabulary for one in prompt):
        most = dialogue.vocabulary - 1
        raise ApiError(400, f"prompt has a token id that is not from 0 to {most}", param="prompt")
    return prompt


BODIES = (CompletionRequest,)


def router(service: Service) -> APIRouter:
    return route(service, "/v1/completions", CompletionRequest, CompletionBuilder)


class CompletionBuilder(ChunkBuilder):
    """Builds responses of OpenAI's text completions."""

    prefix, kind, content_key = "cmpl-", "text_completion", "text"
    chunk_kind = kind

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        count = self._answers.count
        self._offsets = [TokenOffsets() for _ in range(count)]
        self._choices = [self._chunk(index, "", self._logprobs([])) for index in range(count)]
        for index in range(count):
            if self._body.logprobs is None and (text := self._echo(index)):
                yield self._add(index, text, None)
        async for index, part in self._answers:
            if isinstance(part, AnswerEnd):
                yield self._chunk(index, "", self._logprobs([]), self._ended(index, part))
            else:
                shown = self._logprobs(self._with_offsets(index, part))
                text = self._echo(index) if part.prompt else part.text
                yield self._add(index, text, shown)

    def _add(self, index: int, text: str, shown: dict[str, Any] | None) -> dict[str, Any]:
        """Make the chunk of a choice's next part, and add the part to the choice."""
        choice = self._choices[index]
        choice["text"] += text
        for name, values in (shown or {}).items():
            choice["logprobs"][name] += values
        return self._chunk(index, text, shown)

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._answers.job.n]
        return prompt if isinstance(prompt, str) else self._answers.dialogue.decode(prompt, True)

    def _with_offsets(self, index: int, part: AnswerDelta) -> list[tuple[Token, int]]:
        """Return the tokens of a completion with their offsets in the text."""
        dialogue, offsets = self._answers.dialogue, self._offsets[index]
        if part.prompt:
            text = self._echo(index)
            at = [offsets.next(dialogue, token.id, text) for token in part.prompt]
            offsets.at = len(text)
            return list(zip(part.prompt, at, strict=True))
        return [(token, offsets.next(dialogue, token.id)) for token in part.tokens]

    def _logprobs(self, tokens: list[tuple[Token, int]]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return {
            "tokens": [self._text(token.id) for token, _ in tokens],
            "token_logprobs": [self._logprob(token) for token, _ in tokens],
            "top_logprobs": [self._top(token) for token, _ in tokens],
            "text_offset": [offset for _, offset in tokens],
        }

    def _logprob(self, token: Token) -> float | None:
        """Return a token's log-probability; the first token of a prompt has none."""
        return None if token.logprob is None else finite(token.logprob)

    def _top(self, token: Token) -> dict[str, float] | None:
        """Return log-probabilities by text: the likeliest tokens and the token itself."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for each, logprob in (*token.top, (token.id, token.logprob)):
            top.setdefault(self._text(each), finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Return a token as text; an incomplete character in OpenAI's notation of bytes."""
        data = self._answers.dialogue.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenOffsets:
    """Computes the offsets of tokens in a text, in characters."""

    def __init__(self) -> None:
        self.at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, dialogue: Dialogue, token_id: int, text: str | None = None) -> int:
        """Return the character offset of the next token of a prompt or of an answer.

        `text` is the prompt's text, or None for an answer. Special tokens have no length, unless
        the prompt's text contains them.
        """
        began, added = self.at, dialogue.tokenizer.added_tokens_decoder.get(token_id)
        special = added is not None and added.special
        if not special or (text is not None and text.startswith(added.content, began)):
            self.at += len(self._decoder.decode(dialogue.token_bytes(token_id)))
        return began if text is None else min(began, len(text))
