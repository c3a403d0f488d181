"""Approximation of missing experts that have a low gate weight.

While decoding, each miss is judged by its expert's tail weight (see `core.gates`). A miss is served
by the first of these rules that is on and has a threshold above the tail weight:

1. skip: the expert is not computed;
2. substitute: the expert is computed with the weights of a resident expert that was often chosen
   with it (see `rules.substitutes`); if there is none, the next rule follows;
3. low precision: the expert is computed from its low-precision copy (HOBBIT, section 3.2).

Hits and prompts are exact, and so is an expert whose prefetch is complete or has started its last
chunk. The eviction policy sees exact experts only. These rules change the model's output: the user
chooses them.

With `promote`, the exact expert is fetched into the cache after its copy was computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.config.base import Approximation
from greenroom.core.events import Routed
from greenroom.core.options.rules.promotion import PromotionQueue
from greenroom.core.options.rules.substitutes import Substitutes
from greenroom.core.pieces import Pieces
from greenroom.core.plan import (
    EXACT,
    LOW,
    SKIP,
    ComputedGroup,
    Option,
    PromotionCandidate,
    StepPlan,
    View,
)


def precision(at: Approximation, pieces: Pieces) -> Precision:
    """Build the option that approximates missing experts below thresholds of gate weight."""
    return (PromotingPrecision if at.promote else Precision)(at, pieces)


class Precision(Option):
    """A scheduler option that approximates missing experts below thresholds of gate weight.

    Missing experts are skipped, substituted, or computed from low-precision copies.
    """

    approximates = True

    def __init__(self, thresholds: Approximation, pieces: Pieces) -> None:
        self.thresholds = thresholds
        self._substitutes = Substitutes(pieces.offsets) if thresholds.substitute else None
        self._promotions = PromotionQueue()

    def plan(self, event: Routed, plan: StepPlan | None, view: View) -> StepPlan | None:
        if event.prefill or event.tail_weights is None:
            return plan
        if self._substitutes is not None:
            self._substitutes.count(event.layer, event.experts)
        low = event.tail_weights < self.thresholds.highest
        low &= ~view.resident(event.experts)
        if not low.any():
            return plan
        judged = plan or StepPlan.of(event, view.pieces)
        for row in np.flatnonzero(low).tolist():
            self._judge(event, judged, row, view)
        changed = (judged.form != EXACT).any() or (judged.weights != event.experts).any()
        return judged if changed else plan

    def _judge(self, event: Routed, plan: StepPlan, row: int, view: View) -> None:
        """Choose whether a missing expert is exact, low-precision, skipped or substituted."""
        assert event.tail_weights is not None
        expert, tail_weight = int(event.experts[row]), float(event.tail_weights[row])
        if view.borrowed(expert):
            flight = view.in_flight(expert)
            if flight is None or flight.sure:
                return
        if tail_weight < self.thresholds.skip:
            plan.form[row] = SKIP
        elif tail_weight < self.thresholds.substitute and (
            (substitute := self._substitute(event, plan, expert, view)) >= 0
        ):
            plan.weights[row] = substitute
        elif tail_weight < self.thresholds.low:
            plan.form[row] = LOW

    def _substitute(self, event: Routed, plan: StepPlan, expert: int, view: View) -> int:
        """Find a resident substitute expert that the step has not chosen.

        -1 if there is none, or if a further pinned expert would leave no victim to evict.
        """
        assert self._substitutes is not None
        # A further pinned expert must leave a victim to evict, on its own device too.
        pinned = event.experts.size + int((plan.weights != event.experts).sum())
        if pinned >= view.room(expert):
            return -1
        first, end = view.pieces.offsets[event.layer : event.layer + 2]
        allowed = view.resident(np.arange(first, end))
        allowed[event.experts - first] = False
        substitute = self._substitutes.find(event.layer, expert, allowed)
        return substitute if substitute < 0 or pinned < view.room(substitute) else -1


class PromotingPrecision(Precision):
    """A scheduler option that approximates missing experts, and fetches the exact experts later."""

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        if group.form == LOW and not group.prefill:
            self._promotions.add(group.layer, group.experts, view.promotions())

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        return self._promotions.latest()

    def dismiss(self, expert: int) -> None:
        self._promotions.remove(expert)
