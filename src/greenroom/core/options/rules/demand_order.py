"""Hottest-expert-bit-first: the order in which the missing experts of a step are transferred.

D2MoE stores experts in nested bit planes, and its principle HEBF transfers the bits of the hottest
expert first, so that computing and loading overlap most. Its abstract has no formula; this rule is
Greenroom's reading. Demanded transfers that have not begun are ordered by
 1. the plane: a low-precision copy (the high bits of a nested expert) before exact experts and the
    remainders of nested ones, and the top segment of a split expert before its bottom segment;
 2. the number of the pass's tokens that chose the expert, the most first;
 3. the id.
An exact expert whose copy is not in memory is one read, which begins with the copy's bits: it
counts as exact. The order changes durations only, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.events import Routed
from greenroom.core.pieces import Pieces
from greenroom.core.plan import Option, StepPlan, View


class HottestFirst(Option):
    """A scheduler option that transfers low-precision copies first, then experts of most tokens."""

    counts_tokens = True

    def __init__(self, pieces: Pieces) -> None:
        self._experts = pieces.experts
        # By which multiple of `experts` a piece's id begins: experts, secondary pieces, remainders.
        self._plane = (1, 0, 1) if pieces.copies is not None else (0, 1, 1)
        self._tokens: dict[int, int] = {}

    def plan(self, event: Routed, plan: StepPlan | None, view: View) -> StepPlan | None:
        """Record how many tokens chose each expert of a step; the plan stays as it is."""
        counts = [1] * event.experts.size if event.rows is None else event.rows.tolist()
        self._tokens = dict(zip(event.experts.tolist(), counts, strict=True))
        return plan

    def order(self, pieces: Sequence[int]) -> list[int]:
        """Sort the experts, segments and copies that a step waits for.

        The order is by precision (low-precision copies and top segments first), then by the number
        of tokens that chose the expert, then by id.
        """
        return sorted(pieces, key=self._rank)

    def _rank(self, piece: int) -> tuple[int, int, int]:
        kind, expert = divmod(piece, self._experts)
        return self._plane[kind], -self._tokens.get(expert, 0), piece
