"""Drafts of one token that a part of the model predicts, such as an MTP layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from greenroom.core.speculation.drafts import MEMORY, PRIOR, Draft

FIRST_CHANCE = 0.7  # that a predicted token is right, before any was compared
UNKNOWN = -1  # stands for a token that is predicted only if a pass is to verify it


class Chance:
    """How often predicted tokens were right.

    Unlike tokens that are looked up, they are known only if they were computed. So a low chance
    slowly returns to its first value while nothing is predicted, and then it is tried again.
    """

    def __init__(self) -> None:
        self._right, self._all = PRIOR * FIRST_CHANCE, PRIOR

    @property
    def value(self) -> float:
        """Return the chance that a predicted token is right."""
        return self._right / self._all

    def record(self, right: bool) -> None:
        """Record whether a predicted token was right."""
        self._right, self._all = self._right + right, self._all + 1
        if (excess := self._all / MEMORY) > 1:
            self._right, self._all = self._right / excess, self._all / excess

    def forget(self) -> None:
        """Record that nothing was predicted for a pass."""
        self._right += (PRIOR * FIRST_CHANCE - self._right) / MEMORY
        self._all += (PRIOR - self._all) / MEMORY


class ModelDrafter:
    """Drafts the next token of one text by a function that predicts it."""

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
        if not count:
            self._chance.forget()
            return []
        self._open = self._predict()
        return [self._open]
