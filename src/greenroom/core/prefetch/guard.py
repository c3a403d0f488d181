"""The prefetch guard: switches prefetching off if decode passes are not faster with it.

A trial alternates blocks of passes with and without prefetching (A B B A ..., so that a drift
affects both sides alike). Two neighbouring blocks are a pair; its ratio is that of their mean
times, with / without. A trial ends
 - when one side is clearly slower: in every one of at least three pairs, and together by the time
   of `LOSS` (8) passes; a block that is much slower is cut short;
 - when, after 8, 16 or 32 pairs, the bootstrap interval of the trimmed mean of the pairs' log
   ratios excludes 0;
 - undecided after the last pair. The first trial then decides by the trimmed mean, later ones
   change nothing.
The next trial follows after 512 passes, then 1024 and so on, or sooner if the share of stalls
shifts or the caller reports a change.

Cost: of n passes, whatever their times, at most FIRST + SHARE * n belong to trials, and in a trial
each side has half of the blocks. If one side always takes r times as long as the other, a trial
loses at most the time of max(20, 8 (r - 1)) passes of the faster side.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK = 4  # passes of a side before the other side's turn
SETTLE = 1  # of these, not measured: the other side still has an effect
LOOKS = (8, 16, 32)  # pairs after which the interval is computed
LEVEL = 0.01  # of each interval, two-sided
DRAWS = 1000  # bootstrap samples
TRIM = 0.2  # of the pairs, at either end
CLEAR = 3  # pairs needed for a clear case
LOSS = 8.0  # passes lost that end a trial
CLIP = 3.0  # the most passes that one counts as lost: one hiccup does not cut a block short

WARM_UP = 8  # passes before the first trial: the cache is cold
INTERVAL, LONGEST = 512, 8192  # passes between trials
FIRST, SHARE = 2 * 2 * BLOCK * LOOKS[-1], 0.04  # passes of trials: two complete ones, and a share
WINDOW = 64  # passes whose median share of stalls is compared
SHIFT = 0.1  # change of the share of stalls that calls for a new trial
MOST_TOKENS = 64  # a pass with more tokens is a prompt's


class Guard:
    """The decision whether forward passes prefetch experts, by timed trials with and without.

    on:      the decision for the next pass; the first passes prefetch, unless `start_off` says so
    verdict: one line about the last change of the decision; None before the first trial has ended
    trials:  the number of completed trials
    """

    def __init__(self, seed: int = 0) -> None:
        self.on = True
        self.verdict: str | None = None
        self.trials = 0  # completed
        self._random = np.random.default_rng(seed)
        self._trial: Trial | None = None
        self._incumbent = True
        self._passes = self._tested = self._tokens = 0
        self._next, self._interval = WARM_UP, INTERVAL
        self._stalls: list[float] = []
        self._usual: float | None = None

    def start_off(self) -> None:
        """Let passes run without prefetching until the first trial has ended."""
        self.on = self._incumbent = False

    def passed(self, seconds: float, stall_s: float, tokens: int = 1) -> None:
        """Record the time of a forward pass, and its stalls for missing experts.

        seconds: the time of the pass
        stall_s: the seconds of this time in which computation waited for experts
        tokens:  the number of tokens in the pass

        A pass counts only if it has as many tokens as the pass before, and at most MOST_TOKENS. So
        prompts and the first token after a prompt are left out.
        """
        comparable = tokens == self._tokens and tokens <= MOST_TOKENS
        self._tokens = tokens
        if not comparable or not 0 < seconds < math.inf:
            return
        self._passes += 1
        if self._trial is not None:
            self._test(self._trial, seconds)
        else:
            self._watch(stall_s / seconds)
        if self._trial is None and self._due():
            self._trial = Trial(self._incumbent, self._random)
        self.on = self._incumbent if self._trial is None else self._trial.on

    def changed(self) -> None:
        """End a trial of prefetching, and begin a new one soon: conditions have changed.

        The new trial begins as soon as the share of passes for trials allows it.
        """
        self._trial, self.on = None, self._incumbent
        self._next, self._interval = self._passes, INTERVAL
        self._stalls, self._usual = [], None

    def _left(self) -> float:
        return FIRST + SHARE * self._passes - self._tested

    def _due(self) -> bool:
        return self._passes >= self._next and self._left() >= 2 * BLOCK * LOOKS[0]

    def _test(self, trial: Trial, seconds: float) -> None:
        self._tested += 1
        result = trial.passed(seconds, last=self._left() < 2 * BLOCK)
        if result is None:
            return
        before, first = self._incumbent, self.verdict is None
        if result.decided or first:
            self._incumbent = result.ratio < 1
        same = self._incumbent == before and not first
        self._interval = min(2 * self._interval, LONGEST) if same else INTERVAL
        self._next = self._passes + self._interval
        if not same:
            self.verdict = result.verdict(self._incumbent)
        self.trials += 1
        self._trial = None
        self._stalls, self._usual = [], None

    def _watch(self, share: float) -> None:
        """Compare the share of stalls with that after the last trial."""
        self._stalls.append(share)
        if len(self._stalls) < WINDOW:
            return
        now, self._stalls = float(np.median(self._stalls)), []
        if self._usual is None:
            self._usual = now
        elif abs(now - self._usual) > SHIFT:
            self.changed()


class TrialResult:
    """The result of a trial of prefetching: the time with it / the time without it.

    ratio:     the trimmed mean of the ratios (with / without) of pairs of blocks of passes
    low, high: the bounds of its bootstrap interval; in a clear case the lowest and highest ratio
    pairs:     the number of pairs of blocks
    decided:   the interval excludes 1
    """

    def __init__(self, logs: list[float], draws: np.random.Generator, clear: bool) -> None:
        self.pairs = len(logs)
        self.ratio = math.exp(float(_trimmed(np.array([logs]))[0]))
        self.low, self.high = min(logs), max(logs)
        if not clear:
            picked = draws.integers(0, self.pairs, (DRAWS, self.pairs))
            sample_means = _trimmed(np.array(logs)[picked])
            self.low, self.high = np.quantile(sample_means, (LEVEL / 2, 1 - LEVEL / 2)).tolist()
        self.decided = self.low > 0 or self.high < 0
        self.low, self.high = math.exp(self.low), math.exp(self.high)

    def verdict(self, on: bool, subject: str = "prefetching") -> str:
        """Describe the result of a trial of prefetching, or of another subject, in one line."""
        change = round(100 * abs(self.ratio - 1))
        less = "less time" if self.ratio < 1 else "longer"
        took = f"{change} % {less}" if change else "as long"
        return (
            f"{subject} {'on' if on else 'off'}: tokens took {took} with it"
            f" ({self.low:.2f} to {self.high:.2f} times, {self.pairs} pairs)"
        )


class Trial:
    """A trial of forward passes with and without prefetching.

    `on` tells whether the next pass prefetches.
    """

    def __init__(self, first: bool, random: np.random.Generator) -> None:
        self.on, self._first, self._random = first, first, random
        # Passes of the current block: (seconds, tokens that each gave a sequence).
        self._block: list[tuple[float, float]] = []
        self._ended: list[
            tuple[float, int]
        ] = []  # blocks of the current pair: (mean seconds, passes)
        self._latest: dict[bool, float] = {}  # each side's latest mean
        self._logs: list[float] = []  # of each pair: with / without
        self._lost = 0.0  # passes lost by the slower side of each pair

    def passed(self, seconds: float, last: bool = False, tokens: float = 1.0) -> TrialResult | None:
        """Record a forward pass's time; return the trial's result if the pass ends it.

        `last` ends the trial with the current pair of blocks. `tokens` are the tokens that the pass
        gave a sequence; blocks are compared by the time of a token.
        """
        self._block.append((seconds, tokens))
        if len(self._block) < BLOCK and not self._far_behind():
            return None
        times, counts = np.sum(self._block[SETTLE:], 0)
        mean = float(times / counts)
        self._latest[self.on] = mean
        self._ended.append((mean, len(self._block)))
        self._block = []
        if len(self._ended) == 1:
            self.on = not self.on
            return None
        self._pair()  # the next pair begins with the side that ended this one
        n = len(self._logs)
        if n >= CLEAR and self._lost >= LOSS and abs(sum(map(np.sign, self._logs))) == n:
            return TrialResult(self._logs, self._random, clear=True)
        if n in LOOKS or last:
            result = TrialResult(self._logs, self._random, clear=False)
            return result if result.decided or last or n == LOOKS[-1] else None
        return None

    def _far_behind(self) -> bool:
        """Tell whether the current block has lost half of the passes that end a trial."""
        other = self._latest.get(not self.on)
        if other is None or len(self._block) <= SETTLE:
            return False
        lost = sum(min(seconds / tokens / other - 1, CLIP) for seconds, tokens in self._block)
        return lost >= LOSS / 2

    def _pair(self) -> None:
        (one, m), (two, n) = self._ended
        slow, fast, passes = (one, two, m) if one > two else (two, one, n)
        self._lost += min(LOSS / 2, (slow / fast - 1) * passes)
        log = math.log(two / one)
        self._logs.append(log if self.on else -log)
        self._ended = []


def _trimmed(rows: np.ndarray) -> np.ndarray:
    """Return the mean of each row without its smallest and largest values: [R, N] -> [R]."""
    cut = int(TRIM * rows.shape[1])
    trimmed_means: np.ndarray = np.sort(rows, 1)[:, cut : rows.shape[1] - cut].mean(1)
    return trimmed_means
