"""What users choose of an option, and what misses may be served with. Imports nothing heavy: the
command line makes its options from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option


@dataclass(frozen=True, slots=True)
class Approximation:
    """Tail weights (see `gates`) below which a miss gets less than its exact expert; 0: never.

    low:        it is computed from its copy in `precision`; copies have `share` of the cache's
                memory
    skip:       it is not computed
    substitute: it is computed with another expert's weights
    follow:     the exact expert is loaded after its copy was computed, while the link is idle
    """

    low: float = 0.0
    skip: float = 0.0
    substitute: float = 0.0
    follow: bool = False
    precision: str = "off"
    share: float = 0.125

    @property
    def most(self) -> float:
        """The largest threshold: no weight from here on is judged."""
        return max(self.low, self.skip, self.substitute)


@dataclass(frozen=True)
class OptionConfig:
    """What users choose of one option of the scheduler: the fields of a subclass.

    `SchedulerConfig` has the fields of all options, and asks each of them in turn. Every default
    asks for nothing.
    """

    def check(self) -> None:
        """UsageError for fields that exclude each other."""

    def approximation(self) -> Approximation | None:
        """What misses may be served with instead of their exact experts; None: nothing."""
        return None

    def uses_host(self) -> bool:
        """Whether the host's processor may compute misses."""
        return False

    def proposes(self) -> bool:
        """Whether it has experts fetched while a link is idle: slots are lent for these, whether
        anything is prefetched or not."""
        return False

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        """The option, None where it is off. `costs` are those of the links and processors, None
        where the host's processor computes nothing."""
        return None
