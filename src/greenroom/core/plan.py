"""The plan of a step, and the interface of options that change it.

A step whose experts are all computed as stored, on their home devices, has no plan. Options decide
which weights are used, in which form, on which processor. The scheduler decides about slots,
sources of transfers, and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cost import Costs
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints, Pieces

EXACT, LOW, SKIP = 0, 1, 2  # forms: stored weights, the low-precision copy, not computed
Flags = NDArray[np.bool_]


class Plan(NamedTuple):
    """The weights, form and processor of each expert of a step; all arrays are [n].

    request: index into the routed experts
    weights: the expert whose weights are used; a different one is a substitute
    form:    EXACT, LOW or SKIP
    place:   the device's number, or HOST
    """

    request: Ints
    weights: Ints
    form: NDArray[np.int8]
    place: NDArray[np.int8]

    @classmethod
    def of(cls, event: Routed, pieces: Pieces) -> Plan:
        """Build the default plan: every expert exact, on its home device."""
        n = event.experts.size
        return cls(
            np.arange(n),
            event.experts.copy(),
            np.zeros(n, np.int8),
            pieces.home_device[event.experts].astype(np.int8),
        )

    def ordered(self, experts: Ints) -> tuple[Plan, int]:
        """Order the rows: exact ones first, then low, skipped and substituted ones.

        Returns the ordered plan, and how many rows are exact.
        """
        kind = np.where(
            (self.form == EXACT) & (self.weights != experts[self.request]), 3, self.form
        )
        order = np.argsort(kind, kind="stable")
        rows = self.request[order], self.weights[order], self.form[order], self.place[order]
        return Plan(*rows), int((kind == EXACT).sum())


class PromotionCandidate(NamedTuple):
    """An expert that an option wants fetched while a link is idle."""

    expert: int
    layer: int


class ComputedGroup(NamedTuple):
    """Experts of a step that a processor has computed in one call.

    device: the device's number, or HOST
    form:   EXACT, LOW or SKIP
    tokens: how many tokens each expert has, [n]
    """

    layer: int
    prefill: bool
    device: int
    form: int
    experts: Sequence[int]
    tokens: Sequence[int]


class TransferStatus(NamedTuple):
    """The state of a piece's transfer; `sure`: all of its chunks have started."""

    sure: bool


class View(Protocol):
    """The scheduler's state as options see it, valid during one call."""

    pieces: Pieces

    def resident(self, experts: Ints) -> Flags:
        """Flags [n] of the experts that have a slot of the cache."""

    def borrowed(self, expert: int) -> bool:
        """Tell whether a prefetch of the expert, complete or not, has a borrowed slot."""

    def in_flight(self, expert: int) -> TransferStatus | None:
        """The transfer of an expert; None where it has none."""

    def in_host(self, expert: int) -> bool:
        """Tell whether the expert has a slot of host memory, complete or not."""

    def room(self, expert: int) -> int:
        """Slots of the expert's group that are neither pinned nor borrowed."""

    def promotions(self) -> int:
        """How many promotion candidates may wait; 0 where no slot can be borrowed for them."""

    def backlog(self, step_pieces: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """Chunks that a new demand waits for, as (link, piece, chunks).

        They are the chunks on lanes, and those that the step's own pieces still lack.
        """


class Option:
    """An option of the scheduler; methods that are not overridden cost nothing.

    approximates: its plans may have forms other than EXACT
    uses_host:    its plans may leave experts to the host's processor
    """

    approximates = False
    uses_host = False

    def plan(self, event: Routed, plan: Plan | None, view: View) -> Plan | None:
        """Return the plan of a step, changed or not; the scheduler's state may not change."""
        return plan

    def started(self, link: int, lane: int, now: float) -> None:
        """A lane of a link has started a chunk."""

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """A lane of a link has delivered a chunk of `nbytes`."""

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        """A processor has computed a group of experts in `seconds`."""

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        """Experts to fetch while a link is idle, the best first.

        The scheduler dismisses those that are resident or on their way already.
        """
        return ()

    def dismiss(self, expert: int) -> None:
        """A candidate is being fetched, or needs no transfer."""

    def calibrated(self, costs: Costs) -> None:
        """The costs of transfers and computations were measured."""


def overrides(option: Option, method: str) -> bool:
    """Tell whether an option overrides a method of `Option`."""
    return getattr(type(option), method) is not getattr(Option, method)
