"""Never slower: decides from the times of decode passes whether prefetching pays here and now.

A trial runs blocks of passes with and without prefetching in turns (A B B A ..., so that a drift
weighs on both alike) and compares neighbours: the ratio of their mean times is one pair. It ends
 - when one side is clearly behind: at least three pairs, all of one sign, and together `LOSS`
   passes lost; a block that is far behind is cut short;
 - when, after 8, 16 or 32 pairs, the bootstrap interval of the trimmed mean of the pairs' log
   ratios excludes 1;
 - undecided after the last pair. Then the first trial goes by the middle of the interval, later
   ones leave things as they are.
What was decided is tried again after 512 passes, then 1024 and so on, and sooner where the share
of stalls shifts or the caller says that the situation changed.

What it costs: of n passes, whatever their times, at most FIRST + SHARE * n belong to trials, and in
a trial either side has half of the blocks. Where one side steadily takes r times as long as the
other, a trial loses at most max(20, 8 (r - 1)) passes' time, passes of the faster side.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK = 4  # passes before the other side has its turn
SETTLE = 1  # of these, not measured: what the other side left behind still acts
LOOKS = (8, 16, 32)  # pairs after which the interval is looked at
LEVEL = 0.01  # of each look, both sides together
DRAWS = 1000  # of the bootstrap
TRIM = 0.2  # of the pairs, at either end
CLEAR = 3  # pairs that a clear case needs
LOSS = 8.0  # passes lost that end a trial
CLIP = 3.0  # passes that one can lose, as it is counted: one hiccup does not cut a block short

WARM_UP = 8  # passes before the first trial: the cache is cold
INTERVAL, LONGEST = 512, 8192  # passes between trials
FIRST, SHARE = 2 * 2 * BLOCK * LOOKS[-1], 0.04  # passes of trials: two whole ones, and a share
WINDOW = 64  # passes whose median share of stalls is compared
SHIFT = 0.1  # of a pass's time: stalls that move so far are another situation
MOST_TOKENS = 64  # a pass of more is a prompt's


class Guard:
    """Says whether the next pass is to prefetch: `on`. It starts with prefetching on.

    `verdict` is what was decided, in one line for people; it changes only when the decision does.
    """

    def __init__(self, seed: int = 0) -> None:
        self.on = True
        self.verdict: str | None = None
        self.trials = 0  # ended
        self._random = np.random.default_rng(seed)
        self._trial: Trial | None = None
        self._incumbent = True
        self._passes = self._tested = self._tokens = 0
        self._next, self._interval = WARM_UP, INTERVAL
        self._stalls: list[float] = []
        self._usual: float | None = None

    def passed(self, seconds: float, stall_s: float, tokens: int = 1) -> None:
        """A pass took so long, of which it stalled so long.

        Counted are passes of as many tokens as the one before and of at most MOST_TOKENS: neither
        prompts nor the first token after one.
        """
        alike = tokens == self._tokens and tokens <= MOST_TOKENS
        self._tokens = tokens
        if not alike or not 0 < seconds < math.inf:
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
        """Something else happens from here on (another cache size, say): try again, as soon as
        the share of passes for trials allows."""
        self._trial, self.on = None, self._incumbent
        self._next, self._interval = self._passes, INTERVAL
        self._stalls, self._usual = [], None

    def _left(self) -> float:
        return FIRST + SHARE * self._passes - self._tested

    def _due(self) -> bool:
        return self._passes >= self._next and self._left() >= 2 * BLOCK * LOOKS[0]

    def _test(self, trial: Trial, seconds: float) -> None:
        self._tested += 1
        found = trial.passed(seconds, last=self._left() < 2 * BLOCK)
        if found is None:
            return
        before, first = self._incumbent, self.verdict is None
        if found.decided or first:
            self._incumbent = found.ratio < 1
        same = self._incumbent == before and not first
        self._interval = min(2 * self._interval, LONGEST) if same else INTERVAL
        self._next = self._passes + self._interval
        if not same:
            self.verdict = found.verdict(self._incumbent)
        self.trials += 1
        self._trial = None
        self._stalls, self._usual = [], None

    def _watch(self, share: float) -> None:
        """Compare the share of stalls with what it was after the last trial."""
        self._stalls.append(share)
        if len(self._stalls) < WINDOW:
            return
        now, self._stalls = float(np.median(self._stalls)), []
        if self._usual is None:
            self._usual = now
        elif abs(now - self._usual) > SHIFT:
            self.changed()


class TrialResult:
    """What a trial found: the time with prefetching over that without, and how sure that is."""

    def __init__(self, logs: list[float], draws: np.random.Generator, clear: bool) -> None:
        self.pairs = len(logs)
        self.ratio = math.exp(float(_trimmed(np.array([logs]))[0]))
        self.low, self.high = min(logs), max(logs)
        if not clear:
            picked = draws.integers(0, self.pairs, (DRAWS, self.pairs))
            means = _trimmed(np.array(logs)[picked])
            self.low, self.high = np.quantile(means, (LEVEL / 2, 1 - LEVEL / 2)).tolist()
        self.decided = self.low > 0 or self.high < 0
        self.low, self.high = math.exp(self.low), math.exp(self.high)

    def verdict(self, on: bool) -> str:
        """One line for people."""
        change = round(100 * abs(self.ratio - 1))
        less = "less time" if self.ratio < 1 else "longer"
        took = f"{change} % {less}" if change else "as long"
        return (
            f"prefetching {'on' if on else 'off'}: tokens took {took} with it"
            f" ({self.low:.2f} to {self.high:.2f} times, {self.pairs} pairs)"
        )


class Trial:
    """One trial. `on` says on which side the next pass is."""

    def __init__(self, first: bool, random: np.random.Generator) -> None:
        self.on, self._first, self._random = first, first, random
        self._block: list[float] = []  # seconds of the passes of the block under way
        self._ended: list[tuple[float, int]] = []  # of the pair: (mean seconds, passes)
        self._latest: dict[bool, float] = {}  # each side's latest mean
        self._logs: list[float] = []  # of each pair: with / without
        self._lost = 0.0  # passes, by the slower side of each pair

    def passed(self, seconds: float, last: bool = False) -> TrialResult | None:
        """A pass of the side that was `on` took so long. `last`: there is no time for more."""
        self._block.append(seconds)
        if len(self._block) < BLOCK and not self._far_behind():
            return None
        mean = float(np.mean(self._block[SETTLE:]))
        self._latest[self.on] = mean
        self._ended.append((mean, len(self._block)))
        self._block = []
        if len(self._ended) == 1:
            self.on = not self.on
            return None
        self._pair()  # the next one begins with the side that this one ended with
        n = len(self._logs)
        if n >= CLEAR and self._lost >= LOSS and abs(sum(map(np.sign, self._logs))) == n:
            return TrialResult(self._logs, self._random, clear=True)
        if n in LOOKS or last:
            found = TrialResult(self._logs, self._random, clear=False)
            return found if found.decided or last or n == LOOKS[-1] else None
        return None

    def _far_behind(self) -> bool:
        """Whether this block has lost half of what ends the trial."""
        other = self._latest.get(not self.on)
        if other is None or len(self._block) <= SETTLE:
            return False
        return sum(min(seconds / other - 1, CLIP) for seconds in self._block) >= LOSS / 2

    def _pair(self) -> None:
        (one, m), (two, n) = self._ended
        slow, fast, passes = (one, two, m) if one > two else (two, one, n)
        self._lost += min(LOSS / 2, (slow / fast - 1) * passes)
        log = math.log(two / one)
        self._logs.append(log if self.on else -log)
        self._ended = []


def _trimmed(rows: np.ndarray) -> np.ndarray:
    """The mean of each row without its smallest and largest values: [R, N] -> [R]."""
    cut = int(TRIM * rows.shape[1])
    kept: np.ndarray = np.sort(rows, 1)[:, cut : rows.shape[1] - cut].mean(1)
    return kept
