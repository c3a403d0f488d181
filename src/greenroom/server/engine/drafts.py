"""Drafts of running requests: tokens that the next pass verifies beside each request's last one."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from torch import Tensor

from greenroom.core.speculation.drafts import Drafter
from greenroom.core.speculation.model_drafts import ModelDrafter
from greenroom.core.speculation.speculation import Speculation
from greenroom.hf.kv.draft_pass import MOST_ROWS, DraftPass
from greenroom.hf.text.next_tokens import NextTokens

if TYPE_CHECKING:
    from greenroom.server.engine.batches import Share
    from greenroom.server.engine.sequence import Sequence


class Drafts:
    """Drafts of running requests, and the passes that verify them.

    obstacle: why passes of this model cannot verify drafts; "" if they can
    description: the same in a few words, for the start-up line
    """

    def __init__(self, model: Any) -> None:
        self._pass = DraftPass(model)
        self.obstacle, self.description = self._pass.obstacle, self._pass.description
        self.speculation = Speculation(MOST_ROWS, history=True)
        self._current: list[Sequence] = []  # requests of the pass that is timed
        self._drafted: list[list[int]] = []  # their drafts
        self._seconds = 0.0
        self._mtp = NextTokens.of(model, self.obstacle)
        # The request of the last pass, if it was alone, and where its tokens of that pass begin.
        self._single: tuple[Sequence, int] | None = None

    def choose(self, shares: Many[Share]) -> bool:
        """Choose the requests' drafts for the next pass; return whether there are any.

        Only passes of single tokens have drafts.
        """
        self._current = []
        if self.obstacle or not all(_is_single(each, count) for each, count in shares):
            return False
        self._current = [each for each, _ in shares]
        drafters = []
        for each in self._current:
            if each.drafter is None:
                each.drafter = self._drafter()
            each.drafter.extend(each.ids[len(each.drafter) :])
            drafters.append(each.drafter)
        limits = [each.request.max_new_tokens - each.new - 1 for each in self._current]
        if self._mtp is not None and not (self._single and self._mtp.is_ready):
            limits = [0] * len(limits)
        self._drafted = self.speculation.choose(drafters, limits)
        for each, draft in zip(self._current, self._drafted, strict=True):
            each.draft = draft
        return any(self._drafted)

    def _drafter(self) -> Drafter | ModelDrafter:
        if self._mtp is None:
            return self.speculation.drafter(())
        return self.speculation.model_drafter(self._mtp.predict)

    def follow(self, shares: Many[Share]) -> None:
        """Let the MTP layer see the last pass of the next pass's request.

        The passes of a request must be its own. Tokens of a reused KV cache are left out. Call this
        before the time of the next pass begins, since the layer may compute those of a prompt.
        """
        before, self._single = self._single, None
        if self._mtp is None or len(shares) != 1:
            return
        ((each, _),) = shares
        if before is None or before[0] is not each:
            self._mtp.begin()
        else:
            self._mtp.see(each.ids, before[1], each.computed - before[1])
        self._single = each, each.computed

    def verify(self, caches: Many[Any]) -> list[Tensor]:
        """Run a pass with the drafts of its requests, and return their logits.

        They are [1 + draft, vocabulary], or [vocabulary] for a request without a draft.
        """
        logits = self._pass([[each.ids[-1], *each.draft] for each in self._current], caches)
        return [
            rows if each.draft else rows[0]
            for each, rows in zip(self._current, logits, strict=True)
        ]

    def time(self, begin: float) -> bool:
        """Record that the pass took from `begin`, a time of perf_counter, to now.

        Returns whether the pass could have drafts; then call `record` after it.
        """
        self._seconds = time.perf_counter() - begin
        return bool(self._current)

    def record(self, tokens: int) -> None:
        """Record how many tokens the requests got from the pass."""
        self.speculation.record(self._drafted, tokens, self._seconds)

    def remember(self, sequence: Sequence) -> None:
        """Remember the text of an ended request, so that later answers can repeat it."""
        if self._mtp is not None and self._single is not None and self._single[0] is sequence:
            self._single = None
            self._mtp.end()
        if not self.obstacle:
            self.speculation.remember(sequence.ids[sequence.reused :])


def _is_single(sequence: Sequence, count: int) -> bool:
    """Check that a pass computes the last token of a request, and nothing else of it."""
    plain = sequence.scores is None and sequence.pictures is None
    return plain and count == 1 == sequence.pending and sequence.computed > 0
