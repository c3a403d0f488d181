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
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from greenroom.amounts import share_of
from greenroom.core.cost import Costs
from greenroom.core.events import Routed
from greenroom.core.options.rules.buddies import Buddies
from greenroom.core.options.rules.promotion import Recent
from greenroom.core.pieces import Pieces
from greenroom.core.plan import (
    EXACT,
    LOW,
    SKIP,
    Approximation,
    Candidate,
    Group,
    Option,
    OptionConfig,
    Plan,
    View,
)
from greenroom.errors import UsageError
from greenroom.option import INEXACT, option

LOW_BELOW = 0.4  # of a token's gate weights: HOBBIT's T1 = 0.6, from the other end
PRECISIONS = ("off", "int8", "int4")


def gate_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is a share of the gate weights, from 0 to 1: {value}")


@dataclass(frozen=True)
class PrecisionConfig(OptionConfig):
    """Which misses are served with less than the exact expert."""

    miss_precision: str = option(
        "off", "serve misses of small gate weight from the low-precision copies of a pack that has"
        " them (pack --miss-precision): faster, but THE OUTPUT CHANGES, and depends on what the"
        " cache holds", None, PRECISIONS, group=INEXACT,
    )  # fmt: skip
    low_below: float | None = option(
        None, "with --miss-precision: misses of experts that, with all smaller ones of the token,"
        " have less than this share of its gate weights (default: 0.4, which is HOBBIT's T1 = 0.6)",
        "SHARE", group=INEXACT, needs="miss_precision", check=gate_share,
    )  # fmt: skip
    low_share: str = option(
        "12.5%", "with --miss-precision: share of the cache's memory that copies have", "SHARE",
        group=INEXACT, needs="miss_precision", check=share_of,
    )  # fmt: skip
    low_follow: bool = option(
        False, "with --miss-precision: the exact expert follows a copy that was used, while the"
        " link is idle, so that more is exact; tokens take longer",
        group=INEXACT, needs="miss_precision",
    )  # fmt: skip
    skip_below: float = option(
        0.0, "leave out misses below this share of the gate weights, which changes the output:"
        " HOBBIT's T2 = 0.9 is 0.1 (default: none)", "SHARE", group=INEXACT, check=gate_share,
    )  # fmt: skip
    substitute_below: float = option(
        0.0, "replace misses below this share of the gate weights by the expert that is there and"
        " was most often chosen with them, which changes the output (default: none)", "SHARE",
        group=INEXACT, check=gate_share,
    )  # fmt: skip

    def check(self) -> None:
        if self.miss_precision != "off" and self.low_below == 0:
            raise UsageError("--low-below 0 serves no miss from its copy: leave out both")
        at = self._thresholds()
        order = [(name, v) for name, v in (
            ("skip-below", at.skip), ("substitute-below", at.substitute), ("low-below", at.low),
        ) if v]  # fmt: skip
        for (name, value), (above, more) in pairwise(order):
            if value >= more:
                raise UsageError(f"--{name} {value:g} must be less than --{above} {more:g}")

    def approximation(self) -> Approximation | None:
        at = self._thresholds()
        return at if at.most else None

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        at = self._thresholds()
        return precision(at, pieces) if at.most else None

    def _thresholds(self) -> Approximation:
        low = LOW_BELOW if self.low_below is None else self.low_below
        return Approximation(
            low if self.miss_precision != "off" else 0.0,
            self.skip_below,
            self.substitute_below,
            self.low_follow,
            self.miss_precision,
            share_of(self.low_share, "--low-share"),
        )


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
