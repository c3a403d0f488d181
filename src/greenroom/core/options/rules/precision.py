"""Precision: misses of experts with a low gate weight are served with less than the exact expert.

A miss of decoding is judged by its expert's tail weight (see `core.gates`), and served by the
first of these that is allowed and has a threshold above the weight: skipped; computed with the
weights of a substitute (see `rules.buddies`); computed from its low-precision copy (HOBBIT, section
3.2). Hits and prompts are exact, and so is an expert of which a prefetch has begun the last chunk.
The policy hears of exact experts alone. What this changes in the output is the user's choice.

With `follow` the exact expert is promoted after its copy was computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.core.config.base import Approximation
from greenroom.core.events import Routed
from greenroom.core.options.rules.buddies import Buddies
from greenroom.core.options.rules.promotion import Recent
from greenroom.core.pieces import Pieces
from greenroom.core.plan import EXACT, LOW, SKIP, Candidate, Group, Option, Plan, View


def precision(at: Approximation, pieces: Pieces) -> Precision:
    """The option for these thresholds."""
    return (FollowedPrecision if at.follow else Precision)(at, pieces)


class Precision(Option):
    """Plans approximations by thresholds."""

    approximates = True

    def __init__(self, thresholds: Approximation, pieces: Pieces) -> None:
        self.thresholds = thresholds
        self._buddies = Buddies(pieces.offsets) if thresholds.substitute else None
        self._recent = Recent()

    def plan(self, event: Routed, plan: Plan | None, view: View) -> Plan | None:
        if event.prefill or event.tails is None:
            return plan
        if self._buddies is not None:
            self._buddies.note(event.layer, event.experts)
        small = event.tails < self.thresholds.most
        small &= ~view.resident(event.experts)
        if not small.any():
            return plan
        judged = plan or Plan.of(event, view.pieces)
        for row in np.flatnonzero(small).tolist():
            self._judge(event, judged, row, view)
        changed = (judged.form != EXACT).any() or (judged.weights != event.experts).any()
        return judged if changed else plan

    def _judge(self, event: Routed, plan: Plan, row: int, view: View) -> None:
        """Choose how one miss is served."""
        assert event.tails is not None
        expert, tail = int(event.experts[row]), float(event.tails[row])
        if view.borrowed(expert):
            flight = view.in_flight(expert)
            if flight is None or flight.sure:
                return
        if tail < self.thresholds.skip:
            plan.form[row] = SKIP
        elif tail < self.thresholds.substitute and (
            (buddy := self._substitute(event, plan, expert, view)) >= 0
        ):
            plan.weights[row] = buddy
        elif tail < self.thresholds.low:
            plan.form[row] = LOW

    def _substitute(self, event: Routed, plan: Plan, expert: int, view: View) -> int:
        """A resident expert that is not chosen in this step; -1: none, or none can be spared."""
        assert self._buddies is not None
        replaced = int((plan.weights != event.experts).sum())
        if event.experts.size + replaced >= view.room(expert):  # it might leave no victim
            return -1
        first, end = view.pieces.offsets[event.layer : event.layer + 2]
        able = view.resident(np.arange(first, end))
        able[event.experts - first] = False
        return self._buddies.of(event.layer, expert, able)


class FollowedPrecision(Precision):
    """Precision whose exact experts follow the copies that were computed."""

    def computed(self, group: Group, seconds: float, view: View) -> None:
        if group.form == LOW and not group.prefill:
            self._recent.add(group.layer, group.experts, view.promotions())

    def candidates(self, view: View) -> Sequence[Candidate]:
        return self._recent.latest()

    def dismiss(self, expert: int) -> None:
        self._recent.remove(expert)
