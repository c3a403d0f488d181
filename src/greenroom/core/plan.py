"""The plan of how a step's experts are computed, and the options that change it.

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
    """The plan of a step: each expert's weights, precision and processor.

    All arrays are [n].

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
        """Build a step's default plan: every expert exact, on its home device."""
        n = event.experts.size
        return cls(
            np.arange(n),
            event.experts.copy(),
            np.zeros(n, np.int8),
            pieces.home_device[event.experts].astype(np.int8),
        )

    def ordered(self, experts: Ints) -> tuple[Plan, int]:
        """Sort a plan: exact experts first, then low-precision, skipped and substituted ones.

        Returns the ordered plan, and how many rows are exact.
        """
        kind = np.where(
            (self.form == EXACT) & (self.weights != experts[self.request]), 3, self.form
        )
        order = np.argsort(kind, kind="stable")
        rows = self.request[order], self.weights[order], self.form[order], self.place[order]
        return Plan(*rows), int((kind == EXACT).sum())


class PromotionCandidate(NamedTuple):
    """An expert that a scheduler option wants fetched while a link is idle."""

    expert: int
    layer: int


class ComputedGroup(NamedTuple):
    """A group of a step's experts that a processor has computed in one call.

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
    """The state of the transfer of an expert's piece.

    `sure`: all of its chunks have started.
    """

    sure: bool


class View(Protocol):
    """The scheduler's state as its options see it, valid during one call."""

    pieces: Pieces

    def resident(self, experts: Ints) -> Flags:
        """Tell for each expert whether it has a cache slot.

        Flags [n].
        """

    def borrowed(self, expert: int) -> bool:
        """Tell whether an expert's prefetch, complete or not, has a borrowed slot."""

    def in_flight(self, expert: int) -> TransferStatus | None:
        """Return the state of an expert's transfer; None where it has none."""

    def in_host(self, expert: int) -> bool:
        """Tell whether an expert has a slot of host memory, complete or not."""

    def room(self, expert: int) -> int:
        """Count the slots in an expert's slot group that are neither pinned nor borrowed."""

    def promotions(self) -> int:
        """Return how many promotion candidates may wait for a transfer.

        0 where no slot can be borrowed for them.
        """

    def backlog(self, step_pieces: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """Return the chunks that a new demand for an expert must wait for.

        As (link, piece, chunks).

        They are the chunks on lanes, and those that the step's own pieces still lack.
        """


class Option:
    """Base class of scheduler options, which can change how a step's experts are computed.

    Methods that are not overridden cost nothing.

    approximates: its plans may have forms other than EXACT
    uses_host:    its plans may leave experts to the host's processor
    """

    approximates = False
    uses_host = False

    def plan(self, event: Routed, plan: Plan | None, view: View) -> Plan | None:
        """Return a step's plan, changed by the option or as it was.

        The scheduler's state may not change.
        """
        return plan

    def started(self, link: int, lane: int, now: float) -> None:
        """Observe that a link has started a chunk of an expert's bytes."""

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """Observe that a link has delivered a chunk of an expert's bytes."""

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        """Observe that a processor has computed a group of experts, and how long it took."""

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        """Propose experts to fetch while a link is idle, the best first.

        The scheduler dismisses those that are resident or on their way already.
        """
        return ()

    def dismiss(self, expert: int) -> None:
        """Dismiss a proposed expert, which is being fetched or needs no transfer."""

    def calibrated(self, costs: Costs) -> None:
        """Take over measured costs of transfers and computations."""


def overrides(option: Option, method: str) -> bool:
    """Tell whether a scheduler option overrides a method of `Option`."""
    return getattr(type(option), method) is not getattr(Option, method)
