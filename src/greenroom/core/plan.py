"""The plan of a step, and the interface of options that change it.

A step whose experts are all computed as stored, on their own devices, has no plan. Options write
intent: which weights, in which form, on which processor. Slots, sources and groups are outcomes.
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
    """What each expert of a step is computed from, and where; all arrays are [n].

    request: index into the routed experts
    weights: the expert whose weights are used; another one is a substitute
    form:    EXACT, LOW or SKIP
    place:   the device's number, or HOST
    """

    request: Ints
    weights: Ints
    form: NDArray[np.int8]
    place: NDArray[np.int8]

    @classmethod
    def of(cls, event: Routed, pieces: Pieces) -> Plan:
        """Every expert exact, on its own device."""
        n = event.experts.size
        return cls(
            np.arange(n),
            event.experts.copy(),
            np.zeros(n, np.int8),
            pieces.home_device[event.experts].astype(np.int8),
        )

    def ordered(self, experts: Ints) -> tuple[Plan, int]:
        """The plan with exact rows first, then low, skipped and substituted ones; how many are
        exact."""
        kind = np.where(
            (self.form == EXACT) & (self.weights != experts[self.request]), 3, self.form
        )
        order = np.argsort(kind, kind="stable")
        rows = self.request[order], self.weights[order], self.form[order], self.place[order]
        return Plan(*rows), int((kind == EXACT).sum())


class PromotionCandidate(NamedTuple):
    """An expert that an option wants resident while a link is idle, for its layer's next step."""

    expert: int
    layer: int


class ComputedGroup(NamedTuple):
    """Experts of a step that a processor has computed together.

    `tokens` [n] is how many each of them has; `form` is EXACT, LOW or SKIP.
    """

    layer: int
    prefill: bool
    device: int
    form: int
    experts: Sequence[int]
    tokens: Sequence[int]


class Flight(NamedTuple):
    """A piece on its way: `sure` says that nothing of it is left to start."""

    sure: bool


class View(Protocol):
    """What an option may know of the scheduler's state, valid during one call."""

    pieces: Pieces

    def resident(self, experts: Ints) -> Flags:
        """Which of these experts have a slot of the cache, [n]."""

    def borrowed(self, expert: int) -> bool:
        """Whether a prefetch of the expert has a borrowed slot, complete or on its way."""

    def in_flight(self, expert: int) -> Flight | None:
        """The transfer of an expert; None where nothing of it is on its way."""

    def in_host(self, expert: int) -> bool:
        """Whether host memory keeps the expert, complete or on its way."""

    def room(self, expert: int) -> int:
        """Slots of the expert's group that no pinned set holds, less the borrowed ones."""

    def promotions(self) -> int:
        """How many candidates of an option may wait; 0: none is taken, since no slot is lent."""

    def backlog(self, own: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """(link, piece, chunks) that a new demand waits for: chunks on lanes, and what is left of
        the step's `own` pieces."""


class Option:
    """An option of the scheduler; every default does nothing, and costs nothing.

    approximates: whether its plans have forms other than EXACT
    uses_host:    whether its plans leave experts to the host's processor
    """

    approximates = False
    uses_host = False

    def plan(self, event: Routed, plan: Plan | None, view: View) -> Plan | None:
        """The plan of a step, changed or not. No state of the scheduler may change."""
        return plan

    def started(self, link: int, lane: int, now: float) -> None:
        """A lane of a link begins a chunk."""

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """A lane of a link has ended a chunk of so many bytes."""

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        """A processor has computed a group of experts in so many seconds."""

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        """Experts to admit while a link is idle, the best first. One that has a slot already, or
        is on its way, is dismissed."""
        return ()

    def dismiss(self, expert: int) -> None:
        """A candidate was taken, or needs no transfer."""

    def calibrated(self, costs: Costs) -> None:
        """How long transfers and computations take was measured."""


def overrides(option: Option, method: str) -> bool:
    """Whether an option does something at a hook."""
    return getattr(type(option), method) is not getattr(Option, method)
