"""Benchmark entries: settings of a model with their measured rounds, and the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from greenroom.config import LoadConfig
from greenroom.core.cache.pins import Pins
from greenroom.hf.measure.harness import Measurement
from greenroom.plan import intervals
from greenroom.plan.costs import RunMeasurement

LEAST = 2  # rounds that are measured, however long they take
PAIRED = 8  # tokens whose total time is one sample of a comparison


@dataclass
class Entry:
    """Named setting of a benchmark, with its measured rounds.

    calibrated_options: names of options that are set from the routing of a warm-up prompt
    pins:        the pinned experts, if `pin` is a calibrated option
    notes:       the setting's description, and its calibrated values in words
    skip_reason: why the setting is not measured; "" if it is measured
    """

    name: str
    config: LoadConfig
    rounds: list[Measurement] = field(default_factory=list)
    calibrated_options: tuple[str, ...] = ()
    pins: Pins | None = None
    notes: list[str] = field(default_factory=list)
    skip_reason: str = ""

    @property
    def tpots(self) -> list[float]:
        return [session.tpot_s for session in self.rounds]

    def as_row(self, of: Entry) -> dict[str, Any]:
        """Return a benchmark entry's row of the result table, from its rounds.

        `tpot_s` and `ttft_s` are means with confidence intervals, and `ratio` is this entry's time
        per output token divided by that of the entry `of`.
        """
        tokens = sum(len(session.gaps) for session in self.rounds)
        requests = sum(session.requests for session in self.rounds)
        return {
            "name": self.name,
            "policy": self.config.policy,
            "scope": self.config.scope,
            "prefetch": self.config.prefetch,
            "tpot_s": intervals.mean_interval(self.tpots),
            "ttft_s": intervals.mean_interval([float(np.mean(s.ttft)) for s in self.rounds]),
            "ratio": intervals.ratio_interval(self.tpots, of.tpots[: len(self.tpots)]),
            "miss_ratio": sum(s.misses for s in self.rounds) / max(1, requests),
            "bytes_per_token": sum(s.bytes_read for s in self.rounds) / tokens,
            "stall_s_per_token": sum(s.stall_s for s in self.rounds) / tokens,
            "rounds": len(self.rounds),
            "same_tokens": [s.tokens for s in self.rounds]
            == [s.tokens for s in of.rounds[: len(self.rounds)]],
            "notes": list(self.notes),
        }

    def observed(self, expert_bytes: int) -> list[RunMeasurement]:
        """Return a benchmark entry's rounds as measurements that plans are fitted to.

        The list is empty if the entry prefetches without `--no-guard`, since prefetching may then
        be turned off during a round unnoticed.
        """
        ahead = self.config.prefetch != "off"
        if ahead and not self.config.no_guard:
            return []
        return [
            RunMeasurement(
                session.tpot_s,
                session.stall_s / len(session.gaps),
                session.bytes_read / expert_bytes / len(session.gaps),
                session.bytes_read,
                session.busy_s,
                ahead,
            )
            for session in self.rounds
        ]


def winner(entries: Sequence[Entry], plain: Entry) -> Entry:
    """Return the fastest benchmark entry, or `plain` if the fastest gains nothing significant.

    Two entries' times for the same groups of 8 tokens are compared in pairs. The fastest entry wins
    if the upper end of the confidence interval of their ratio is below 1, after 2 or more rounds of
    both.
    """
    best = min(entries, key=lambda entry: float(np.mean(entry.tpots)))
    if best is plain or min(len(best.rounds), len(plain.rounds)) < LEAST:
        return plain
    _, _, high = intervals.ratio_interval(*_pairs(best, plain))
    return best if high < 1 else plain


def _pairs(one: Entry, other: Entry) -> tuple[list[float], list[float]]:
    """Return the seconds that each of two entries took for the same groups of PAIRED tokens."""
    first_seconds, second_seconds = [], []
    for a, b in zip(one.rounds, other.rounds, strict=False):
        n = min(len(a.gaps), len(b.gaps))
        for i in range(0, max(1, n - PAIRED + 1), PAIRED):
            first_seconds.append(sum(a.gaps[i : i + PAIRED]))
            second_seconds.append(sum(b.gaps[i : i + PAIRED]))
    return first_seconds, second_seconds
