"""State of one request in the serving engine: tokens, keys and values, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from greenroom.core.speculation.drafts import Drafter
from greenroom.core.speculation.model_drafts import ModelDrafter
from greenroom.errors import GreenroomError
from greenroom.hf.kv import cache as kv
from greenroom.hf.pictures.tower import PictureFeatures
from greenroom.server.engine.prefixes import Ids, as_ids
from greenroom.server.engine.prompts.segment import Segment
from greenroom.server.engine.prompts.store import PromptLoad
from greenroom.server.engine.requests import (
    Event,
    Finished,
    Listener,
    PromptTokens,
    Request,
    Token,
)
from greenroom.server.engine.tokens.sampling import Sampler
from greenroom.server.engine.tokens.scores import PromptScores


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request in the serving engine, from arrival to end.

    Only the engine's thread changes its fields, except `cancelled`.

    `ids` are the tokens of the prompt and of the answer so far. `cache` holds the keys and values
    of the first `computed` tokens; those of the first `reused` tokens were computed for another
    request. The first `exact` tokens were computed in the same prefill chunks as if the request
    were alone. `load` is the read of a prefix from disk that the request waits for, and `saved` are
    the segment files with the keys and values of its first tokens. Times are of the monotonic
    clock.
    """

    number: int
    request: Request
    listener: Listener
    sampler: Sampler
    end_ids: frozenset[int]
    max_kv_bytes: int  # bytes of keys and values, at its longest
    on_cancel: Callable[[Sequence], None]
    scores: PromptScores | None = None  # of a prompt with prompt_logprobs, until they are sent
    ids: list[int] = field(default_factory=list)
    cache: Any = None
    computed: int = 0
    reused: int = 0
    exact: int = 0
    load: PromptLoad | None = None
    saved: tuple[Segment, ...] = ()
    begun: bool = False  # a pass has computed some of its tokens
    cancelled: bool = False
    finished: bool = False
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    answered: float | None = None  # when its first token came
    requests: int = 0  # of experts, in its passes
    hits: int = 0
    drafter: Drafter | ModelDrafter | None = None  # of its tokens, where speculation is on
    draft: list[int] = field(default_factory=list)  # that the current pass verifies
    pictures: PictureFeatures | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)
        if self.request.pictures is not None:
            self.pictures = PictureFeatures(self.request.pictures)

    @property
    def prompt(self) -> int:
        return len(self.request.ids)

    @property
    def variant(self) -> int:
        """The number of the model's variant that answers a request."""
        return self.request.variant

    @property
    def new(self) -> int:
        """The number of tokens in a request's answer so far."""
        return len(self.ids) - self.prompt

    @property
    def pending(self) -> int:
        """The number of a request's tokens whose keys and values are not computed yet.

        The value is 1 while the answer is generated.
        """
        return len(self.ids) - self.computed

    @property
    def deadline(self) -> float:
        limit = self.request.timeout_s
        return float("inf") if limit is None else self.arrived + limit

    def prefix_keys(self) -> Ids:
        """Return the ids of a request's tokens, with other numbers for the tokens of pictures.

        Requests with the same tokens and other pictures have no common prefix of these.
        """
        keys = as_ids(self.ids)
        if self.pictures is not None:
            keys[: self.prompt] = self.pictures.prompt.keys
        return keys

    def computed_keys(self) -> Ids:
        """Return `prefix_keys` of the tokens whose keys and values are computed."""
        return self.prefix_keys()[: self.computed]

    def cancel(self) -> None:
        """Cancel the request; the engine ends its answer within one token.

        The listener gets a Finished event with the reason cancelled, unless the answer ends first.
        """
        self.on_cancel(self)

    def send_scores(self) -> None:
        """Send the prompt's log-probabilities to the request's listener, if they were requested."""
        if self.scores is not None:
            tokens, self.scores = tuple(self.scores.tokens), None
            self.listener(PromptTokens(tokens))

    def answer(self, logits: Tensor) -> str:
        """Sample the next tokens from the logits of a pass; return why the answer ends, or "".

        The logits are those after the last token, [vocabulary]; with a draft also those after each
        of its tokens, [1 + draft, vocabulary]. They are used up to the first token that is not the
        draft's, whose keys and values are removed with all that follow.
        """
        draft, self.draft = self.draft, []
        reason = "" if self.request.max_new_tokens else "length"
        for row, guess in zip(logits if draft else (logits,), (*draft, None), strict=True):
            token = None if reason else self.sampler(row)
            self.send_scores()
            reason = reason if token is None else self.add_token(token)
            if reason or self.cancelled or token is None or token.id != guess:
                break
            self.computed += 1
        if draft:
            kv.truncate(self.cache, self.computed)
        return reason

    def add_token(self, token: Token) -> str:
        """Append a token to the answer and send it; return why the answer ends.

        The returned reason is stop or length, or an empty string if the answer goes on.
        """
        if self.answered is None:
            self.answered = time.monotonic()
        self.ids.append(token.id)
        self.listener(token)
        if token.id in self.end_ids or self.sampler.over:
            return "stop"
        return "length" if self.new >= self.request.max_new_tokens else ""

    def restart(self, cache: Any) -> None:
        """Drop all keys and values of a request; its tokens are computed again.

        `cache` is the new, empty KV cache.
        """
        self.cache, self.computed, self.exact, self.saved = cache, 0, 0, ()
        if self.scores is not None:
            self.scores.clear()

    def send_result(self, result: Finished) -> None:
        """Send the last event of the answer, and forget the listener.

        A listener may keep the result. Its error has a traceback, whose frames have this sequence
        with its KV cache: a cycle, which would wait for Python's garbage collector.
        """
        listener, self.listener = self.listener, _ignore
        listener(result)

    def result(self, reason: str, error: GreenroomError | None) -> Finished:
        now = time.monotonic()
        return Finished(
            reason=reason,
            prompt_tokens=self.prompt,
            reused_tokens=self.reused,
            new_tokens=self.new,
            queued_s=(self.admitted or now) - self.arrived,
            ttft_s=None if self.answered is None else self.answered - self.arrived,
            duration_s=now - self.arrived,
            hit_ratio=self.hits / self.requests if self.requests else None,
            error=error,
        )


def _ignore(event: Event) -> None:
    """Listen to a sequence that has ended."""
