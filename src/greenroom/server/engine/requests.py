"""What the HTTP side and the engine say to each other.

    ticket = engine.submit(request, listener)    # from any thread; Busy, TooLong or ClosedError
    listener(Token(...)), listener(Token(...)), listener(Finished(...))  # from the engine's thread
    (listener(PromptTokens(...)) comes before them where the request has prompt_logprobs)
    ticket.cancel()                              # its place is free within one token

The engine knows tokens and no text: decoding, stop strings, tools and formats are the other side's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from greenroom.errors import GreenroomError, ModelError, TooLong, UsageError


class Busy(GreenroomError):
    """The queue is full; `retry_after_s` is when a place is likely to be free."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFinite(ModelError):
    """The model gave logits among which no token can be chosen: NaN, or nothing but infinity."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the likeliest; None is the model's own default."""

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
    """One answer to make; `n` answers to a prompt are n of these."""

    ids: tuple[int, ...]  # the prompt's tokens, at least one
    max_new_tokens: int  # 0: the prompt is computed, and nothing follows it
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: tuple[int, ...] | None = None  # None: the model's own; (): never
    top_logprobs: int | None = None  # None: no logprobs; k: the token's own and the k likeliest
    prompt_logprobs: int | None = None  # k: of the prompt's tokens too, which are all computed anew
    grammar: str | None = None  # an llguidance grammar that the answer must follow
    timeout_s: float | None = None  # of the whole answer, the wait in the queue included
    name: str = ""  # of the request, in log lines

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.ids) + self.max_new_tokens

    def check(self, vocabulary: int, context: int) -> None:
        """UsageError or TooLong, where a model of that vocabulary and context cannot answer."""
        if not self.ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= token < vocabulary for token in self.ids):
            raise UsageError(
                f"the prompt has tokens that the model has not (0 to {vocabulary - 1})"
            )
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.length > context:
            raise TooLong(
                f"{len(self.ids)} tokens and {self.max_new_tokens} new ones: there is room for"
                f" {context}"
            )


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens with their log-probabilities; nothing is before the first, so it has
    none."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason`: stop (an end token, the last Token sent), length, cancelled, timeout, stopping (the
    server ends before the answer), or error."""

    reason: str
    prompt_tokens: int
    reused_tokens: int  # of the prompt, whose keys and values were there already
    new_tokens: int
    queued_s: float
    ttft_s: float | None
    duration_s: float
    hit_ratio: float | None  # of the expert requests of the passes that it took part in
    error: GreenroomError | None = None


Event = Token | PromptTokens | Finished
Listener = Callable[[Event], None]
