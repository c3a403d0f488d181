"""Settings of one model against each other, on real tokens: in turns, so that a machine that slows
down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from greenroom.config import LoadConfig
from greenroom.core.pins import Pins
from greenroom.errors import ModelError, PredictorError, UsageError
from greenroom.hf.places import one_processor
from greenroom.hf.stage import Session, Stage
from greenroom.hf.warmed import warm_up
from greenroom.plan import intervals
from greenroom.plan.costs import Observed
from greenroom.trace.prompts import Prompt

PROMPTS = tuple(
    Prompt(text, label)
    for label, text in (
        ("general", "Explain how a library decides which books to keep on the front shelves."),
        ("coding", "def merge(a, b):\n    # merges two sorted lists into one sorted list\n"),
        ("math", "A train leaves at nine and travels 180 km in two hours and a half. How fast"
                 " is it, and when does it arrive if it goes on for another 90 km?"),
        ("story", "Once upon a time there was a stage manager who could not find the lead"),
        ("facts", "List the planets of the solar system with one fact about each of them."),
        ("letter", "Dear neighbours, next Saturday we would like to invite all of you to"),
    )
)  # fmt: skip
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
    rounds: list[Session] = field(default_factory=list)
    wants: tuple[str, ...] = ()
    pins: Pins | None = None
    notes: list[str] = field(default_factory=list)
    without: str = ""

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
            "tpot_s": intervals.mean(self.tpots),
            "ttft_s": intervals.mean([float(np.mean(s.ttft)) for s in self.rounds]),
            "ratio": intervals.ratio(self.tpots, of.tpots[: len(self.tpots)]),
            "miss_ratio": sum(s.misses for s in self.rounds) / max(1, requests),
            "bytes_per_token": sum(s.bytes_read for s in self.rounds) / tokens,
            "stall_s_per_token": sum(s.stall_s for s in self.rounds) / tokens,
            "rounds": len(self.rounds),
            "same_tokens": [s.tokens for s in self.rounds]
            == [s.tokens for s in of.rounds[: len(self.rounds)]],
            "notes": list(self.notes),
        }

    def observed(self, expert_bytes: int) -> list[Observed]:
        """Each round, as a plan takes it; none of a guarded predictor, which may be off."""
        ahead = self.config.prefetch != "off"
        if ahead and not self.config.no_guard:
            return []
        return [
            Observed(
                session.tpot_s,
                session.stall_s / len(session.gaps),
                session.bytes_read / expert_bytes / len(session.gaps),
                session.bytes_read,
                session.busy_s,
                ahead,
            )
            for session in self.rounds
        ]


def contest(
    stage: Stage,
    entries: Sequence[Entry],
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    tokens: int,
    rounds: int,
    seconds: float = float("inf"),
    raw: bool = False,
    said: Callable[[str], object] = lambda text: None,
) -> None:
    """Rounds of all entries, each on the next prompt, begun by another entry each time. No round
    is begun after `seconds`, but the first LEAST. What a round asked for is what caches begin with
    in the next one; the last prompt, which is not counted, is played for the first.

    Of several entries those that this model or machine cannot have are left out, and say why; the
    error of a single one is raised.
    """
    end = time.perf_counter() + seconds
    said("warming up")
    warm_up(stage, entries, prompts[-1], tokens, raw)
    stage.learn()
    alone = len(entries) == 1
    if alone and entries[0].without:
        raise UsageError(entries[0].without)
    for number in range(rounds):
        there = [entry for entry in entries if not entry.without]
        if not there or (number >= LEAST and time.perf_counter() > end):
            break
        prompt = prompts[number % len(prompts)]
        turn = number % len(there)
        for entry in (*there[turn:], *there[:turn]):
            said(f"round {number + 1}: {entry.name}")
            try:
                _check_both(stage, entry, alone)
                stage.attach(entry.config, pins=entry.pins)
            except (UsageError, ModelError, PredictorError) as error:
                if alone or number:
                    raise
                entry.without = str(error)
                continue
            entry.rounds.append(stage.play([prompt], tokens, raw=raw))
        stage.learn()


def _check_both(stage: Stage, entry: Entry, alone: bool) -> None:
    """UsageError where an entry beside others would have misses computed by a second processor, and
    there is none: its row would say nothing of that. Alone it is told so by its run."""
    if entry.config.co_compute == "auto" and not alone and (why := one_processor(stage.parts)):
        raise UsageError(
            f"misses computed where they are need a GPU, and room for experts in host memory: {why}"
        )


def winner(entries: Sequence[Entry], plain: Entry) -> Entry:
    """The fastest, if it is surely faster than plain LRU; else plain LRU. Sure is what holds over
    pairs of the same PAIRED tokens, in no fewer than LEAST rounds."""
    best = min(entries, key=lambda entry: float(np.mean(entry.tpots)))
    if best is plain or min(len(best.rounds), len(plain.rounds)) < LEAST:
        return plain
    _, _, high = intervals.ratio(*_pairs(best, plain))
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


def entry(name: str, base: LoadConfig, options: Mapping[str, Any]) -> Entry:
    """A named setting over the options that all entries share."""
    return Entry(name, replace(base, **options))
