"""The base class of scheduler options' settings, and thresholds for approximating missing experts.

Nothing heavy is imported here, so that the command line can build its options from these classes
quickly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option

VALUE, TOP_K, ALL = PREFETCH_RULES = ("value", "top-k", "all")
EXPERTS, LAYERS = PLACEMENTS = ("experts", "layers")  # of experts on devices: `core.home_devices`
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Approximation:
    """Thresholds of gate weight below which a missing expert is approximated; 0: never.

    A threshold is compared with the expert's tail weight: the share of a token's gate weights that
    the expert and all lower-ranked experts have together (HOBBIT, section 3.2; see `core.gates`).

    skip:       below this threshold, the expert is not computed
    substitute: below this threshold, the expert is computed with a resident expert's weights
    low:        below this threshold, the expert is computed from its low-precision copy
    precision:  the precision of the low-precision copies
    promote:    the exact expert is fetched while the link is idle, after its copy was computed
    share:      the share of the cache's memory for copies
    other:      rules without a threshold that serve misses inexactly, as the start-up line
                describes them: "of layers above 20 left out"
    bias:       not of misses: what routers add to the scores of experts in the cache, as a share of
                the range of a token's scores, so that fewer experts are missing

    If several thresholds are set, an expert is served by the first rule in the order skip,
    substitute, low whose threshold is above its tail weight. If no substitute is found, the next
    rule follows."""

    low: float = 0.0
    skip: float = 0.0
    substitute: float = 0.0
    promote: bool = False
    precision: str = "off"
    share: float = 0.125
    other: tuple[str, ...] = ()
    bias: float = 0.0

    @property
    def highest(self) -> float:
        """Return the highest gate-weight threshold below which misses may be approximated.

        A missing expert with this tail weight or more is computed exactly."""
        return max(self.low, self.skip, self.substitute)

    @property
    def of_misses(self) -> bool:
        """Tell whether misses may be computed inexactly, and not only be avoided."""
        return bool(self.highest or self.other)

    def merge(self, further: Approximation) -> Approximation:
        """Merge with another option's thresholds; the higher threshold of each kind applies."""
        copies = self if self.precision != "off" else further
        return replace(
            copies,
            low=max(self.low, further.low),
            skip=max(self.skip, further.skip),
            substitute=max(self.substitute, further.substitute),
            promote=self.promote or further.promote,
            bias=max(self.bias, further.bias),
            other=(*self.other, *further.other),
        )


@dataclass(frozen=True)
class OptionConfig:
    """Base class of the settings of one scheduler option; subclasses add the fields.

    `SchedulerConfig` inherits from all subclasses and calls the methods of each, in the order of
    its bases. An option is off if its fields have their default values."""

    def check(self) -> None:
        """Check a scheduler option's settings; UsageError for fields that exclude each other."""

    def approximation(self) -> Approximation | None:
        """Return how this option approximates misses; None if it leaves all of them exact.

        An option that skips or replaces experts by another rule than a threshold names the rule in
        `Approximation.other`."""
        return None

    def uses_host(self) -> bool:
        """Tell whether an option lets the host's processor compute missing experts."""
        return False

    def proposes(self) -> bool:
        """Tell whether an option proposes experts to fetch while a link is idle.

        If it does, the proposed experts may borrow cache slots, with or without prefetching."""
        return False

    def changes_times(self) -> bool:
        """Tell whether an option changes times that only an event-driven simulation finds."""
        return False

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        """Build a scheduler option from its settings; None if it is off.

        costs:        durations of transfers and computations; None if the host computes nothing
        expert_bytes: the size of the experts that `costs` describes"""
        return None
