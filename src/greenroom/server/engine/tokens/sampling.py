"""Samples the next token of a request, with its own settings and random numbers.

The steps are in the order of transformers' processors: repetition penalty, presence and frequency
penalties (OpenAI's, over the tokens of the answer), bias, grammar; then temperature, top-k, top-p,
min-p. Each request has its own random generator: equal seeds and equal logits give equal tokens,
whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from greenroom.config import bounded_temperature
from greenroom.errors import UsageError
from greenroom.server.engine.requests import NotFinite, Request, Sampling, Token
from greenroom.server.engine.tokens.grammar import Grammar

LIKELIEST = 1024  # tokens that are tried for top-p before all are sorted
MOST_LOGPROBS = 100
LEAST_PENALTY = 0.01  # of repetition; a smaller one makes every repeated token certain


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings of one request, completed by the model's generation config.

    Temperature 0 is greedy.
    """

    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, requested: Sampling, defaults: Any) -> Settings:
        """Return requested settings, completed by `defaults`, the model's generation config.

        If do_sample is not true in `defaults`, only its repetition_penalty is used, and the answer
        is greedy unless a temperature is requested. UsageError for invalid values.
        """
        check(requested)
        samples = bool(getattr(defaults, "do_sample", False))

        def setting(name: str, default: float) -> float:
            values = (
                getattr(requested, name),
                getattr(defaults, name, None) if samples else None,
                default,
            )
            return next(float(value) for value in values if value is not None)

        if samples and requested.temperature is None:
            temperature = getattr(defaults, "temperature", None) or 1.0
        else:
            temperature = requested.temperature or 0.0
        settings = cls(
            temperature=bounded_temperature(float(temperature)),
            top_p=setting("top_p", 1.0),
            top_k=int(setting("top_k", 0)),
            min_p=setting("min_p", 0.0),
            repetition_penalty=requested.repetition_penalty
            if requested.repetition_penalty != 1.0
            else float(getattr(defaults, "repetition_penalty", None) or 1.0),
        )
        _within("repetition_penalty", settings.repetition_penalty, LEAST_PENALTY, 1 / LEAST_PENALTY)
        return settings


def check(sampling: Sampling) -> None:
    """Raise UsageError, which names the setting, for an invalid sampling setting."""
    _within("temperature", sampling.temperature, 0, 100)
    _within("top_p", sampling.top_p, 0, 1, above=True)
    _within("top_k", sampling.top_k, 0, 1 << 31)
    _within("min_p", sampling.min_p, 0, 1)
    _within("seed", sampling.seed, -(1 << 63), (1 << 63) - 1)
    _within("presence_penalty", sampling.presence_penalty, -2, 2)
    _within("frequency_penalty", sampling.frequency_penalty, -2, 2)
    for _, bias in sampling.logit_bias:
        _within("logit_bias", bias, -100, 100)


def _within(
    name: str, value: float | None, low: float, high: float, *, above: bool = False
) -> None:
    if value is None or ((low < value or (low == value and not above)) and value <= high):
        return
    allowed = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    raise UsageError(f"{name} must be {allowed}, got {value}")


class Sampler:
    """Chooses the tokens of one request from the model's logits.

    `defaults` is the model's generation config, `vocabulary` the number of logits. If there is a
    `grammar`, the tokens follow it. UsageError for an invalid setting.
    """

    def __init__(
        self, request: Request, defaults: Any, vocabulary: int, grammar: Grammar | None = None
    ) -> None:
        requested = request.sampling
        self._settings, self._requested = Settings.of(requested, defaults), requested
        self._grammar, self._logprobs = grammar, request.top_logprobs
        if self._logprobs is not None:
            _within("top_logprobs", self._logprobs, 0, min(MOST_LOGPROBS, vocabulary))
        _check_ids("logit_bias", [token for token, _ in requested.logit_bias], vocabulary)
        self._bias = _sparse(requested.logit_bias)
        self._random = torch.Generator()
        if requested.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(requested.seed)
        self._answer: Counter[int] = Counter()
        self._repeats = (
            torch.zeros(vocabulary, dtype=torch.bool)
            if self._settings.repetition_penalty != 1.0
            else None
        )
        if self._repeats is not None:
            self._repeats[list(request.ids)] = True

    def __call__(self, logits: Tensor) -> Token:
        """Sample the next token from logits [vocabulary].

        The token's log-probabilities are those of the logits before penalties, bias, grammar and
        temperature. NotFinite if the largest logit is NaN or infinite, UsageError if the grammar
        allows no token.
        """
        logits = logits.float().cpu()
        _check_finite(logits)
        changed = self._changed(logits)
        if changed is not logits:
            _check_finite(changed)
        chosen = self._choose(changed)
        if self._repeats is not None:
            self._repeats[chosen] = True
        self._answer[chosen] += 1
        if self._grammar is not None:
            self._grammar.take(chosen)
        return self._token(chosen, logits)

    @property
    def over(self) -> bool:
        """Is the answer complete by its grammar, so that no token can follow?"""
        return self._grammar is not None and self._grammar.over

    def _token(self, chosen: int, logits: Tensor) -> Token:
        if self._logprobs is None:
            return Token(chosen)
        all_of_them = logits.log_softmax(-1)
        values, ids = all_of_them.topk(self._logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(chosen, float(all_of_them[chosen]), top)

    def _changed(self, logits: Tensor) -> Tensor:
        """Return logits after penalties, bias and grammar; the argument is not changed."""
        requested, settings = self._requested, self._settings
        plain = not (self._bias or requested.presence_penalty or requested.frequency_penalty)
        if plain and self._repeats is None and self._grammar is None:
            return logits
        logits = logits.clone()
        if self._repeats is not None:
            repeated, by = logits[self._repeats], settings.repetition_penalty
            logits[self._repeats] = torch.where(repeated < 0, repeated * by, repeated / by)
        if self._answer and (requested.presence_penalty or requested.frequency_penalty):
            ids = torch.tensor(list(self._answer))
            counts = torch.tensor(list(self._answer.values()), dtype=torch.float32)
            logits[ids] -= requested.presence_penalty + requested.frequency_penalty * counts
        if self._bias:
            logits.index_add_(0, *self._bias)
        if self._grammar is not None:
            logits[~self._grammar.allowed(len(logits))] = -torch.inf
        return logits

    def _choose(self, logits: Tensor) -> int:
        settings = self._settings
        if settings.temperature == 0 or settings.top_k == 1:
            return int(logits.argmax())
        # With a maximum of 0 no quotient is NaN or overflows in softmax.
        values, ids = _cut((logits - logits.max()) / settings.temperature, settings)
        chances = values.softmax(-1)
        return int(ids[int(torch.multinomial(chances, 1, generator=self._random))])


def _cut(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the logits that top-k, top-p and min-p keep, likeliest first, and their ids."""
    count = logits.numel()
    if settings.top_k:
        count = min(count, settings.top_k)
    elif settings.top_p < 1:  # a sort of all tokens is seldom needed
        few = min(count, LIKELIEST)
        share = (logits.topk(few).values - logits.logsumexp(-1)).exp().sum()
        count = few if share > settings.top_p else count
    elif settings.min_p == 0:
        return logits, torch.arange(count)
    values, ids = logits.topk(count)
    if settings.top_p < 1:
        # A token is kept while the tokens before it do not reach top-p yet.
        candidates = values if settings.top_k else logits
        chances = (values - candidates.logsumexp(-1)).exp()
        before = chances.cumsum(-1) - chances
        count = int((before < settings.top_p).sum().clamp(min=1))
        values, ids = values[:count], ids[:count]
    if settings.min_p > 0:
        count = int((values >= values[0] + math.log(settings.min_p)).sum())
        values, ids = values[:count], ids[:count]
    return values, ids


def _check_finite(logits: Tensor) -> None:
    """Raise NotFinite if the logits leave no token to choose. A token of -inf is excluded."""
    largest = float(logits.max())  # NaN if any of them is
    if not math.isfinite(largest):
        what = "NaN" if math.isnan(largest) else f"{largest:+}"
        raise NotFinite(f"the largest of the model's logits is {what}: no token can be chosen")


def _sparse(pairs: Sequence[tuple[int, float]]) -> tuple[Tensor, Tensor] | None:
    if not pairs:
        return None
    ids, values = zip(*pairs, strict=True)
    return torch.tensor(ids), torch.tensor(values, dtype=torch.float32)


def _check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise UsageError(
                f"{name}: the model has no token {token}: ids must be from 0 to {vocabulary - 1}"
            )
