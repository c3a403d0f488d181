"""Drafts of one token, predicted by a part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from greenroom.core.speculation.drafts import MEMORY, PRIOR, Draft

FIRST_CHANCE = 0.5  # that a predicted token is right, before any was compared
# Passes without a prediction, after which one is made only to compare it: at first, and at most.
# Right ones are followed by more, up to a run of `RUN`; each run doubles the number, until drafts
# are worthwhile.
WAIT, LONGEST_WAIT = 8, 512
RUN = 4
UNKNOWN = -1  # stands for a token that is predicted only if a pass is to verify it


class Chance:
    """How often predicted tokens are right, and when to try again while none is verified."""

    def __init__(self) -> None:
        self._right, self._all = PRIOR * FIRST_CHANCE, PRIOR
        self._wait = self._left = WAIT  # passes until the next prediction: in all, and from now
        self._run = 0  # predictions in a row that are only compared

    @property
    def value(self) -> float:
        """Return the chance that a predicted token is right."""
        return self._right / self._all

    @property
    def is_due(self) -> bool:
        """Tell whether a token should be predicted only to measure the chance."""
        return self._left <= 0

    def record(self, right: bool) -> None:
        """Record whether a predicted token was right."""
        self._right, self._all = self._right + right, self._all + 1
        if (excess := self._all / MEMORY) > 1:
            self._right, self._all = self._right / excess, self._all / excess
        if self._run and (not right or self._run == RUN):
            self._wait = self._left = min(2 * self._wait, LONGEST_WAIT)
            self._run = 0

    def skip(self) -> None:
        """Record a pass without a prediction."""
        self._left -= 1

    def compare(self) -> None:
        """Record that a token is predicted only to compare it."""
        self._run += 1

    def verify(self) -> None:
        """Record that a token is predicted, and that a pass verifies it."""
        self._wait, self._left, self._run = WAIT, WAIT, 0


class ModelDrafter:
    """Drafts the next token of one text by a function that predicts it.

    Unlike tokens that are looked up, predicted ones are known only if they were computed. So while
    none is worth a pass's time, one is computed from time to time and compared with the text. That
    takes a part of the model, where a wrong draft takes a pass about as long as two.
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

    def tokens(self, draft: Draft, count: int) -> list[int]:
        """Return the first `count` tokens of the draft, predicted now."""
        if count:
            self._chance.verify()
            self._open = self._predict()
            return [self._open]
        if draft.tokens and self._chance.is_due:
            self._chance.compare()
            self._open = self._predict()
        else:
            self._chance.skip()
        return []
