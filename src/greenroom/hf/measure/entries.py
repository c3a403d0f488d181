"""Settings that are measured, with what each did in every round, and which of them wins."""

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

LEAST = 2  # rounds, however long they take
PAIRED = 8  # tokens that are compared together


@dataclass
class Entry:
    """A setting by name, and what it did in each round.

    wants:   options that the routing of the warm-up gives it
    pins:    the set that stays, where that was one of them
    notes:   what it stands for, and what was found for it
    without: why it is not measured, where it is not
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
        """Means over the rounds with their intervals; `ratio` is of the TPOT to that of another."""
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
        """Each round, as a plan takes it; none of a guarded predictor, which may be off."""
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
    """The fastest, if it is surely faster than plain LRU; else plain LRU. Sure is what holds over
    pairs of the same PAIRED tokens, in no fewer than LEAST rounds."""
    best = min(entries, key=lambda entry: float(np.mean(entry.tpots)))
    if best is plain or min(len(best.rounds), len(plain.rounds)) < LEAST:
        return plain
    _, _, high = intervals.ratio_interval(*_pairs(best, plain))
    return best if high < 1 else plain


def _pairs(one: Entry, other: Entry) -> tuple[list[float], list[float]]:
    """Seconds that both took for the same tokens, PAIRED at a time."""
    ones, others = [], []
    for a, b in zip(one.rounds, other.rounds, strict=False):
        n = min(len(a.gaps), len(b.gaps))
        for i in range(0, max(1, n - PAIRED + 1), PAIRED):
            ones.append(sum(a.gaps[i : i + PAIRED]))
            others.append(sum(b.gaps[i : i + PAIRED]))
    return ones, others
