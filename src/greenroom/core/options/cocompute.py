"""Co-compute: settings for computing some missing experts on the host's processor.

The option itself is in `core.options.rules.cocompute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.core.config.base import OptionConfig
from greenroom.option import MACHINE, option

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option


@dataclass(frozen=True)
class CoComputeConfig(OptionConfig):
    """Settings of co-compute, by which the host's processor computes some missing experts."""

    co_compute: str = option(
        "off", "with a GPU, let the host's processor compute missing experts where that is sooner"
        " than moving them to the GPU; answers may then differ in their last bits from run to run,"
        " depending on what was in the cache", None, ("auto", "off"), group=MACHINE,
    )  # fmt: skip

    def uses_host(self) -> bool:
        return self.co_compute == "auto"

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        if self.co_compute == "off" or costs is None:
            return None
        from greenroom.core.options.rules.cocompute import CoCompute
        from greenroom.core.options.rules.rates import Rates

        return CoCompute(Rates(costs, expert_bytes, pieces.devices))
