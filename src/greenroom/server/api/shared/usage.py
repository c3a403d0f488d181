"""Usage and log-probabilities in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.engine.requests import Token
from greenroom.server.engine.tokens.reader import AnswerEnd

LEAST = -9999.0  # JSON has no infinity


def usage(prompt_tokens: int, ends: Iterable[AnswerEnd]) -> dict[str, Any]:
    """Return OpenAI's `usage` object: the token counts of all choices of a response together.

    `prompt_tokens` is the number of tokens of all prompts; `ends` has an AnswerEnd for each answer.
    """
    ends = list(ends)
    new = sum(end.finished.new_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": reused(ends)},
        "completion_tokens_details": {"reasoning_tokens": sum(e.reasoning_tokens for e in ends)},
    }


def reused(ends: Iterable[AnswerEnd]) -> int:
    """Return the largest number of cached prompt tokens that any one answer reused."""
    return max((end.finished.reused_tokens for end in ends), default=0)


def logprobs(dialogue: Dialogue, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens, in the form of OpenAI's chat and responses APIs."""
    return [
        {
            **_logprob(dialogue, token.id, token.logprob),
            "top_logprobs": [_logprob(dialogue, *each) for each in token.top],
        }
        for token in tokens
    ]


def _logprob(dialogue: Dialogue, token_id: int, logprob: float | None) -> dict[str, Any]:
    data = dialogue.token_bytes(token_id)
    text = data.decode("utf-8", "replace")
    return {"token": text, "bytes": list(data), "logprob": finite(logprob)}


def finite(logprob: float | None) -> float:
    """Return a log-probability, but at least -9999, since JSON has no infinity."""
    return LEAST if logprob is None else max(LEAST, logprob)
