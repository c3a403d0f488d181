"""Drafts of one token, predicted by a part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from greenroom.core.speculation.drafts import MEMORY, PRIOR, Draft

FIRST_CHANCE = 0.7  # that a predicted token is right, before any was compared
# Passes without a prediction, after which one is made to measure its chance and time: at first, and
# at most. Each such prediction doubles the number, until one is made because it is worthwhile.
RETRY, LONGEST_RETRY = 64, 4096
UNKNOWN = -1  # stands for a token that is predicted only if a pass is to verify it


class Chance:
    """How often predicted tokens were right, and when to try again if none is predicted."""

    def __init__(self) -> None:
        self._right, self._all = PRIOR * FIRST_CHANCE, PRIOR
        self._skipped, self._retry = 0, RETRY

    @property
    def value(self) -> float:
        """Return the chance that a predicted token is right."""
        return self._right / self._all

    @property
    def is_due(self) -> bool:
        """Tell whether a token should be predicted to measure its chance and time."""
        return self._skipped >= self._retry

    def record(self, right: bool) -> None:
        """Record whether a predicted token was right."""
        self._right, self._all = self._right + right, self._all + 1
        if (excess := self._all / MEMORY) > 1:
            self._right, self._all = self._right / excess, self._all / excess

    def skip(self) -> None:
        """Record a pass without a prediction."""
        self._skipped += 1

    def predict(self) -> None:
        """Record that a token is predicted."""
        self._retry = min(2 * self._retry, LONGEST_RETRY) if self.is_due else RETRY
        self._skipped = 0


class ModelDrafter:
    """Drafts the next token of one text by a function that predicts it.

    Unlike tokens that are looked up, predicted ones are known only if they were computed. So one is
    computed from time to time, even if its expected gain is too small.
    """

    def __init__(self, chance: Chance, predict: Callable[[], int]) -> None:
        """`predict` returns a guess of the token after the text; it may take long."""
        self._chance, self._predict = chance, predict
        self._open: int | None = None  # the predicted token, until it is compared
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._length += 1
            if self._open is not None:
                self._chance.record(token == self._open)
            self._open = None

    def draft(self) -> Draft:
        """Return a draft of one token, which is not predicted yet."""
        return Draft((UNKNOWN,), self._chance.value)

    @property
    def due(self) -> int:
        """Return how many tokens the next pass should verify in any case."""
        return int(self._chance.is_due)

    def tokens(self, draft: Draft, count: int) -> list[int]:
        """Return the first `count` tokens of the draft, predicted now."""
        if not count:
            self._chance.skip()
            return []
        self._chance.predict()
        self._open = self._predict()
        return [self._open]
