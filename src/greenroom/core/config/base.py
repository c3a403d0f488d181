"""The base class of scheduler options' settings, and thresholds for approximating missing experts.

Nothing heavy is imported here: the command line builds its options from these classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option


@dataclass(frozen=True, slots=True)
class Approximation:
    """Thresholds of gate weight below which an expert's miss is approximated; 0: never.

    They are of the tail weight (see `gates`).

    low:        the expert is computed from its copy in `precision`
    skip:       the expert is not computed
    substitute: the expert is computed with another expert's weights
    promote:    the exact expert is fetched after its copy was computed, while the link is idle
    share:      share of the cache's memory for copies
    """

    low: float = 0.0
    skip: float = 0.0
    substitute: float = 0.0
    promote: bool = False
    precision: str = "off"
    share: float = 0.125

    @property
    def highest(self) -> float:
        """Return the highest gate-weight threshold below which misses may be approximated.

        Misses with a tail weight from here on are exact.
        """
        return max(self.low, self.skip, self.substitute)


@dataclass(frozen=True)
class OptionConfig:
    """Base class of the settings of one scheduler option; subclasses have the fields.

    `SchedulerConfig` inherits from all subclasses and calls each of them in turn. The defaults of
    the fields leave the option off.
    """

    def check(self) -> None:
        """Check a scheduler option's settings; UsageError for fields that exclude each other."""

    def approximation(self) -> Approximation | None:
        """Return the thresholds below which misses are approximated; None: all are exact."""
        return None

    def uses_host(self) -> bool:
        """Tell whether an option lets the host's processor compute missing experts."""
        return False

    def proposes(self) -> bool:
        """Tell whether an option proposes experts to fetch while a link is idle.

        Slots may then be borrowed for them, with or without prefetching."""
        return False

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        """Build a scheduler option from its settings; None where it is off.

        `costs` are those of links and processors, None where the host computes nothing."""
        return None
