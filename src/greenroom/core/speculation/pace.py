"""Times of forward passes, and the drafts that are worth their time."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.speculation.drafts import Draft

NEWEST = 0.1  # weight of the newest pass in the average time of its kind
# What a pass of one token leaves of the weight of passes with several: if those were slow for a
# while, because experts had to be fetched, they are tried again after some hundred passes.
WEIGHT_LEFT = 1 - 1 / 256
# Until passes of several tokens were measured: a pass of r tokens takes 1 + FIXED + EACH * (r - 1)
# times as long as one of one token.
FIXED, EACH = 0.4, 0.25
LEAST_S = 1e-9
PRIOR = 0.5  # weight of each of the two passes that stand for this assumption
# The first passes of two tokens may be slow, since memory is touched for the first time. Until
# passes of this weight were recorded, one counts as at most so many times as long as expected.
# Longer ones cost too much to be tried again.
ENOUGH, MOST_LONGER = 2.5, 1.25


class PassTimes:
    """Seconds of forward passes, as a function of their number of tokens.

    Passes of one token are another kind than those of several, whose time grows with each token.
    More tokens also need more experts: so the times tell what missing experts cost.
    """

    def __init__(self) -> None:
        self._one: float | None = None
        # Decayed sums over passes of several tokens: weight, tokens, tokens², seconds, both.
        self._sums = [0.0] * 5
        self._line: tuple[float, float] | None = None  # seconds without tokens, and of each

    def record(self, tokens: int, seconds: float) -> None:
        """Record the time of a pass."""
        if tokens == 1:
            self._line = None
            self._sums = [WEIGHT_LEFT * each for each in self._sums]
            self._one = seconds if self._one is None else self._one + NEWEST * (seconds - self._one)
            return
        if tokens == 2 and self._one is not None and self._sums[0] < ENOUGH:
            seconds = min(seconds, MOST_LONGER * self.seconds(tokens))
        self._line = None
        new = 1.0, tokens, tokens * tokens, seconds, tokens * seconds
        self._sums = [(1 - NEWEST) * a + b for a, b in zip(self._sums, new, strict=True)]

    @property
    def is_ready(self) -> bool:
        """Tell whether a pass of one token was measured."""
        return self._one is not None

    def seconds(self, tokens: int) -> float:
        """Return the expected time of a pass with so many tokens."""
        assert self._one is not None
        if tokens == 1:
            return self._one
        if self._line is None:
            self._line = self._fit(self._one)
        start, each = self._line
        return start + each * tokens

    def _fit(self, one: float) -> tuple[float, float]:
        """Fit a line to the times of passes of several tokens."""
        sums = list(self._sums)
        for t in (2, 8):
            s = one * (1 + FIXED + EACH * (t - 1))
            for at, value in enumerate((1.0, t, t * t, s, t * s)):
                sums[at] += PRIOR * value
        weight, x, xx, y, xy = sums
        each = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        return max(0.0, y / weight - each * x / weight), each


def worthwhile(drafts: Sequence[Draft], times: PassTimes, most: int) -> list[int]:
    """Return how many tokens of each sequence's draft the next pass should verify.

    `drafts` has one draft for each sequence of the pass; `most` is the most tokens of a pass. The
    result has the largest expected number of tokens for the expected time of the pass.
    """
    count = len(drafts)
    candidates = sorted(
        ((draft.chance ** (at + 1), place) for place, draft in enumerate(drafts)
         for at in range(len(draft.tokens))),
        key=lambda each: -each[0],
    )[: max(0, most - count)]  # fmt: skip
    lengths = [0] * count
    if not candidates or not times.is_ready:
        return lengths
    expected, best, used = float(count), count / max(times.seconds(count), LEAST_S), 0
    for number, (gain, _) in enumerate(candidates, 1):
        expected += gain
        rate = expected / max(times.seconds(count + number), LEAST_S)
        if rate > best:
            best, used = rate, number
    for _, place in candidates[:used]:
        lengths[place] += 1
    return lengths
