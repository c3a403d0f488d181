"""Speculation: which drafts the next forward pass verifies, for runs, servers and simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.core.speculation.drafts import Acceptance, Drafter, History
from greenroom.core.speculation.guard import SpeculationGuard
from greenroom.core.speculation.model_drafts import Chance, ModelDrafter
from greenroom.core.speculation.pace import PassTimes, worthwhile

AnyDrafter = Drafter | ModelDrafter


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of speculation: passes with drafts, their draft tokens, and the right ones."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0


class Speculation:
    """Decides which drafts the next pass verifies, by measured chances and times.

    `most` is the most tokens of a pass. Tokens are drafted from a text itself, and with `history`
    from the texts that were remembered; or a part of the model predicts them.
    """

    def __init__(self, most: int, history: bool = False) -> None:
        self.counts, self.guard = SpeculationCounts(), SpeculationGuard()
        self.history = History() if history else None
        self._most, self._times, self._acceptance = most, PassTimes(), Acceptance()
        self._chance = Chance()  # of predicted tokens
        self._has_drafts = False  # whether the pass has drafts, or would have but for the guard

    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """Begin to draft for a text."""
        drafter = Drafter(self._acceptance, self.history)
        drafter.extend(tokens)
        return drafter

    def model_drafter(self, predict: Callable[[], int]) -> ModelDrafter:
        """Begin to draft for a text by a function that predicts its next token."""
        return ModelDrafter(self._chance, predict)

    def choose(self, drafters: Sequence[AnyDrafter], limits: Sequence[int]) -> list[list[int]]:
        """Return the draft tokens that the next pass verifies, for each of its sequences.

        `limits` are the most draft tokens of each. Call `record` after the pass.
        """
        drafts = [each.draft() for each in drafters]
        drafts = [
            draft._replace(tokens=draft.tokens[:limit])
            for draft, limit in zip(drafts, limits, strict=True)
        ]
        lengths = worthwhile(drafts, self._times, self._most)
        self._has_drafts = any(lengths)
        if not self.guard.on:
            return [[] for _ in drafts]
        return [
            each.tokens(draft, n) for each, draft, n in zip(drafters, drafts, lengths, strict=True)
        ]

    def record(self, drafts: Sequence[Sequence[int]], tokens: int, seconds: float) -> None:
        """Record the time of a pass.

        `drafts` are those of its sequences, which together got `tokens` new tokens.
        """
        sequences, drafted = len(drafts), sum(map(len, drafts))
        self._times.record(sequences + drafted, seconds)
        if drafted:
            self.counts.passes += 1
            self.counts.drafted += drafted
            self.counts.accepted += tokens - sequences
        if self._has_drafts:
            self.guard.passed(seconds, tokens, sequences)

    def remember(self, tokens: Sequence[int]) -> None:
        """Remember a text, so that later texts can repeat it."""
        if self.history is not None:
            self.history.add(tokens)

    def as_json(self) -> dict[str, Any]:
        """Return JSON-ready statistics."""
        return {
            "passes": self.counts.passes,
            "drafted": self.counts.drafted,
            "accepted": self.counts.accepted,
            "on": self.guard.on,
            "verdict": self.guard.verdict,
        }
