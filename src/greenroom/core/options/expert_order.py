"""Settings of the order in which the experts of a layer are computed.

The option itself is in `core.options.rules.expert_order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.core.config.base import OptionConfig
from greenroom.errors import UsageError
from greenroom.option import CACHE, option

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option

RESIDENT, CACHED, ID, ACCESS = ORDERS = ("resident", "cached", "id", "access")


@dataclass(frozen=True)
class ExpertOrderConfig(OptionConfig):
    """Settings of the order in which the experts of a layer are computed."""

    expert_order: str = option(
        RESIDENT, "in which order the experts of a layer are computed. resident: those in memory,"
        " then the others as they arrive; cached: the same, but the missing experts of a prompt"
        " replace those that were computed before them; id: by their numbers, so that an expert in"
        " memory waits for a missing one before it; access: by their numbers, and each missing"
        " expert is read only when its turn comes (the last three as in ProMoE's ablation)",
        None, ORDERS, group=CACHE,
    )  # fmt: skip

    def check(self) -> None:
        if self.expert_order == RESIDENT:
            return
        for option_name, on in (
            ("--co-compute auto", self.uses_host()),
            ("an option that approximates misses", self.approximation() is not None),
        ):
            if on:
                raise UsageError(
                    f"--expert-order {self.expert_order} and {option_name} exclude each other:"
                    " give one of them"
                )

    def changes_times(self) -> bool:
        return self.expert_order != RESIDENT

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        if self.expert_order == RESIDENT:
            return None
        if pieces.split is not None:
            raise UsageError(
                f"--expert-order {self.expert_order} works only with whole experts: leave out"
                " --split"
            )
        from greenroom.core.options.rules.expert_order import InOrder

        return InOrder(on_access=self.expert_order == ACCESS, cached=self.expert_order == CACHED)
