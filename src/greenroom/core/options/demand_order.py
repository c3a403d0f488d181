"""Settings of the order in which the missing experts of a step are transferred.

The option itself is in `core.options.rules.demand_order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.core.config.base import OptionConfig
from greenroom.option import CACHE, option

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option


@dataclass(frozen=True)
class DemandOrderConfig(OptionConfig):
    """Settings of the order in which the missing experts of a step are transferred."""

    demand_order: str = option(
        "id", "which missing experts of a layer are transferred first: id, in the order of their"
        " numbers; hottest, those that most tokens of the pass chose, low-precision copies before"
        " exact experts (D2MoE's hottest-expert-bit-first)", None, ("id", "hottest"), group=CACHE,
    )  # fmt: skip

    def changes_times(self) -> bool:
        return self.demand_order != "id"

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        if self.demand_order == "id":
            return None
        from greenroom.core.options.rules.demand_order import HottestFirst

        return HottestFirst(pieces)
