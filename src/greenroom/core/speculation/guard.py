"""The speculation guard: switches drafts off if tokens do not come faster with them.

Only passes count for which a draft is worth its expected time. A trial alternates blocks of these
passes with and without their drafts, as the prefetch guard does (`core/prefetch/guard.py`), and
compares the time of a token. So it observes what expectations miss, such as experts that later
passes lack because a wrong draft has evicted them.
"""

from __future__ import annotations

import math

import numpy as np

from greenroom.core.prefetch.guard import INTERVAL, LONGEST, Trial

WARM_UP = 16  # passes before the first trial


class SpeculationGuard:
    """The decision whether passes verify drafts, by timed trials with and without.

    on:      the decision for the next pass with a draft
    verdict: one line about the last change of the decision; None before the first trial has ended
    trials:  the number of completed trials
    """

    def __init__(self, seed: int = 0) -> None:
        self.on = self._incumbent = True
        self.verdict: str | None = None
        self.trials = 0
        self._random = np.random.default_rng(seed)
        self._trial: Trial | None = None
        self._passes, self._next, self._interval = 0, WARM_UP, INTERVAL
        self._sequences = 0

    def passed(self, seconds: float, tokens: int, sequences: int) -> None:
        """Record a pass for which there was a draft.

        tokens, sequences: new tokens of the pass's sequences, and their number
        A pass counts only if it has as many sequences as the pass before.
        """
        comparable = sequences == self._sequences
        self._sequences = sequences
        if not comparable or not tokens or not 0 < seconds < math.inf:
            return
        self._passes += 1
        if self._trial is not None:
            self._test(self._trial, seconds, tokens / sequences)
        elif self._passes >= self._next:
            self._trial = Trial(self._incumbent, self._random)
        self.on = self._incumbent if self._trial is None else self._trial.on

    def _test(self, trial: Trial, seconds: float, tokens: float) -> None:
        result = trial.passed(seconds, tokens=tokens)
        if result is None:
            return
        before, first = self._incumbent, self.verdict is None
        if result.decided or first:
            self._incumbent = result.ratio < 1
        same = self._incumbent == before
        self._interval = min(2 * self._interval, LONGEST) if same and not first else INTERVAL
        self._next = self._passes + self._interval
        if not same or first:
            self.verdict = result.verdict(self._incumbent, "speculation")
        self.trials += 1
        self._trial = None
