"""The plan of how a step's experts are computed, and the options that change it.

A step is one layer of one forward pass. If all its experts are computed as stored, on their home
devices, it has no plan. Options decide which weights are used, in which form, on which processor.
The scheduler decides which slots, sources of transfers and expert groups are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cost import Costs
from greenroom.core.events import Routed
from greenroom.core.pieces import Ints, Pieces

if TYPE_CHECKING:
    from greenroom.core.scheduler.step import Step

EXACT, LOW, SKIP = 0, 1, 2  # forms: stored weights, the low-precision copy, not computed
Flags = NDArray[np.bool_]
Scores = NDArray[np.float32]


class StepPlan(NamedTuple):
    """The plan of one layer's experts in a pass: each expert's weights, form and processor.

    All arrays are [n], one element for each expert of the step (one pass at one layer).

    request: index into the experts that the router chose
    weights: the expert whose weights are used; if it is not the chosen expert, it is a substitute
    form:    EXACT, LOW (the low-precision copy) or SKIP (not computed)
    place:   the device's number, or HOST for the host's processor
    """

    request: Ints
    weights: Ints
    form: NDArray[np.int8]
    place: NDArray[np.int8]

    @classmethod
    def of(cls, event: Routed, pieces: Pieces) -> StepPlan:
        """Build the default plan of a layer's step: every expert exact, on its assigned device."""
        n = event.experts.size
        return cls(
            np.arange(n),
            event.experts.copy(),
            np.zeros(n, np.int8),
            pieces.home_device[event.experts].astype(np.int8),
        )

    def ordered(self, experts: Ints) -> tuple[StepPlan, int]:
        """Sort a plan: exact experts first, then low-precision, skipped and substituted ones.

        `experts` are those that the router chose. Returns the sorted plan, and the number of exact
        rows.
        """
        if not self.form.any() and np.array_equal(self.weights, experts):  # nothing to sort
            return self, self.request.size
        kind = np.where(
            (self.form == EXACT) & (self.weights != experts[self.request]), 3, self.form
        )
        order = np.argsort(kind, kind="stable")
        rows = self.request[order], self.weights[order], self.form[order], self.place[order]
        return StepPlan(*rows), int((kind == EXACT).sum())


class PromotionCandidate(NamedTuple):
    """An expert that a scheduler option wants fetched while a link is idle.

    `layer` is the expert's layer: the fetch is dropped if the layer's next step does not use it.
    """

    expert: int
    layer: int


class ComputedGroup(NamedTuple):
    """An expert group: experts of a step that a processor has computed in one call.

    layer:   the layer of the step
    prefill: the pass reads a prompt
    device:  the device's number, or HOST for the host's processor
    form:    EXACT, LOW (from low-precision copies) or SKIP (not computed)
    experts: dense ids (layer offset + expert number), [n]
    tokens:  how many tokens chose each expert, [n]
    """

    layer: int
    prefill: bool
    device: int
    form: int
    experts: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def of_token(cls, layer: int, device: int, experts: Sequence[int]) -> ComputedGroup:
        """Describe exact experts of a step of one token."""
        return cls(layer, False, device, EXACT, experts, [1] * len(experts))


class TransferStatus(NamedTuple):
    """The state of the transfer of an expert, segment or copy.

    `sure`: all of its chunks have started, and it was not dropped.
    """

    sure: bool


class View(Protocol):
    """The scheduler's state as its options see it; valid only during the call that gets it."""

    pieces: Pieces

    def resident(self, experts: Ints) -> Flags:
        """Return a flag for each expert: it has a cache slot that is not borrowed, [n]."""

    def in_slots(self, layer: int) -> Flags:
        """Return a flag for each expert of a layer: all its bytes are in a slot, [experts].

        The slot may be borrowed. An expert on its way to its slot has no flag. Of a split expert,
        the top segment counts.
        """

    def borrowed(self, expert: int) -> bool:
        """Tell whether an expert has borrowed a cache slot for an early fetch.

        The fetch is a prefetch, or the promotion of an expert that was computed without a slot. It
        may be complete or not.
        """

    def in_flight(self, expert: int) -> TransferStatus | None:
        """Return the state of an expert's transfer; None if no transfer is under way."""

    def in_host(self, expert: int) -> bool:
        """Tell whether an expert has a slot of host memory; its bytes may still be on their way."""

    def room(self, expert: int) -> int:
        """Count the slots in an expert's slot group that its layer's experts may fill.

        These are the group's slots without those for pinned experts, and without the slots that
        prefetches have borrowed from any group.
        """

    def promotions(self) -> int:
        """Return the largest number of promotion candidates that an option should keep.

        A candidate is an expert that was computed without a slot, and may be fetched into one. The
        number is 0 if no slots may be borrowed, or the policy never inserts.
        """

    def backlog(self, step_pieces: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """Return the chunks that a new demand for an expert must wait for.

        step_pieces: ids of the step's experts (or segments, copies) that are on their way already

        Returns (link, piece, chunks): the chunks that these pieces still lack on the first and on
        the last link of their path, and one for each other chunk that a link carries now.
        """


class Option:
    """Base class of scheduler options, which can change how a layer's experts are computed.

    approximates:  its plans may have forms other than EXACT
    uses_host:     its plans may leave experts to the host's processor
    counts_tokens: it needs to know how many tokens chose each expert (`Routed.rows`)
    step_class:    the class of steps in place of the scheduler's own; None: no other

    The scheduler calls only those methods that a subclass overrides, so the others cost nothing.
    """

    approximates = False
    uses_host = False
    counts_tokens = False
    step_class: type[Step] | None = None

    def plan(self, event: Routed, plan: StepPlan | None, view: View) -> StepPlan | None:
        """Return the plan of how a layer's experts are computed, changed or not.

        None is the default plan. The method must not change the scheduler's state.
        """
        return plan

    def share(self, misses: Sequence[int], hits: int, view: View) -> int:
        """Return how many of a token's missing experts the host computes: the last ones.

        misses: ids of those that are not in slots of the only device, but in host memory
        hits:   the number of the step's other experts

        An option with this method needs no other of its decisions for such a step.
        """
        return 0

    def choose(self, layer: int, scores: Scores, chosen: Ints, view: View) -> Ints:
        """Return the experts that decoded tokens use, in place of their router's choice.

        scores: the router's scores of all experts, before the softmax: [tokens, experts]
        chosen: ids within the layer of the experts that the router has chosen, [tokens, top_k]

        The result has the shape of `chosen`; it is `chosen` itself if nothing changes. The method
        is called before the layer's step begins, possibly while transfers land.
        """
        return chosen

    def order(self, pieces: Sequence[int]) -> Sequence[int]:
        """Sort the transfers that a step waits for and that have not begun.

        pieces: the ids of the experts, segments or copies to transfer
        """
        return pieces

    def started(self, link: int, lane: int, now: float) -> None:
        """Observe that a link has started a chunk of an expert's bytes."""

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """Observe that a link has delivered a chunk of an expert's bytes."""

    def copied(self, nbytes: int, seconds: float) -> None:
        """Observe how long a device took to copy experts from host memory, by itself.

        nbytes: the sum of the pieces' sizes, whatever the experts take on disk
        """

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        """Observe that a processor has computed an expert group, and how long it took."""

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        """Propose experts to fetch while a link is idle, the best first.

        Experts that are resident or on their way already may be among them.
        """
        return ()

    def dismiss(self, expert: int) -> None:
        """Remove an expert from the candidates: its transfer has begun, or is not needed."""

    def calibrated(self, costs: Costs) -> None:
        """Replace the expected costs of transfers and computations by newly measured ones."""


def overrides(option: Option, method: str) -> bool:
    """Tell whether a scheduler option overrides a method of `Option`."""
    return getattr(type(option), method) is not getattr(Option, method)
