"""Messages between the HTTP server and the engine's thread: requests, tokens, results.

    ticket = engine.submit(request, listener)    # from any thread; Busy, TooLong or ClosedError
    listener(Token(...)), listener(Token(...)), listener(Finished(...))  # from the engine's thread
    (listener(PromptTokens(...)) comes before them if the request has prompt_logprobs)
    ticket.cancel()                              # the request ends within one token

The engine handles tokens only. The HTTP server decodes them to text, and handles stop strings,
tools and formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from greenroom.errors import GreenroomError, ModelError, TooLong, UsageError

if TYPE_CHECKING:
    from greenroom.hf.pictures.prompt import PromptPictures


class Busy(GreenroomError):
    """The server cannot take a request now; clients may retry after `retry_after_s` seconds.

    The queue is full, the model is still loading, or too many other requests are being prepared.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFinite(ModelError):
    """The model's largest logit is NaN or infinite, so that no token can be chosen."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request to the engine.

    Temperature 0 is greedy. None means the value of the model's generation config; a `seed` of None
    means a random seed.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # the same tokens again, whatever else is in the batch
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine for one answer to a prompt.

    Several answers to one prompt are several requests.
    """

    ids: tuple[int, ...]  # the prompt's tokens, at least one
    max_new_tokens: int  # 0: the prompt is computed, and nothing follows it
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: tuple[int, ...] | None = None  # None: the model's own; (): never
    top_logprobs: int | None = None  # None: no logprobs; k: the token's own and the k likeliest
    prompt_logprobs: int | None = None  # k: of the prompt's tokens too, which are all computed anew
    grammar: str | None = None  # an llguidance grammar that the answer must follow
    pictures: PromptPictures | None = None
    timeout_s: float | None = None  # of the whole answer, the wait in the queue included
    name: str = ""  # of the request, in log lines
    variant: int = 0  # of the model: 0 is the model itself, the others are its adapters, in order

    @property
    def length(self) -> int:
        """The greatest length of a request in tokens: its prompt and its longest answer."""
        return len(self.ids) + self.max_new_tokens

    def check(self, vocabulary: int, context: int) -> None:
        """Raise UsageError or TooLong if a model cannot answer the request.

        `vocabulary` is the number of the model's tokens. `context` is the greatest number of tokens
        of a prompt and its answer together.
        """
        if not self.ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= token < vocabulary for token in self.ids):
            raise UsageError(
                "the prompt has a token id that the model does not have: ids must be from 0 to"
                f" {vocabulary - 1}"
            )
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.length > context:
            raise TooLong(
                f"the prompt has {len(self.ids)} tokens and the answer may have"
                f" {self.max_new_tokens}: together they must fit the context of {context} tokens"
            )


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer or a prompt, with its log-probabilities if they were requested."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Event of the engine: a prompt's tokens with their log-probabilities, if requested.

    The event comes before the tokens of the answer.
    """

    tokens: tuple[Token, ...]


REASONS = ("stop", "length", "cancelled", "timeout", "stopping", "error")


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer: why the answer ended, its token counts and times in seconds.

    `reason` is one of REASONS: stop (the last token is an end token, or completes the grammar),
    length, cancelled, timeout, stopping (the server stops before the answer ends), or error.
    """

    reason: str
    prompt_tokens: int
    reused_tokens: int  # of the prompt, whose keys and values came from the prefix cache
    new_tokens: int
    queued_s: float
    ttft_s: float | None
    duration_s: float
    hit_ratio: float | None  # of the expert requests of the passes that it took part in
    error: GreenroomError | None = None


Event = Token | PromptTokens | Finished
Listener = Callable[[Event], None]
