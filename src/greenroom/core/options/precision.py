"""Settings that say which missing experts are approximated, and how.

The rules themselves are in `core.options.rules.precision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from greenroom.amounts import parse_share
from greenroom.core.config.base import Approximation, OptionConfig
from greenroom.errors import UsageError
from greenroom.option import INEXACT, option

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option

LOW_BELOW = 0.4  # a tail weight: HOBBIT's T1 = 0.6
PRECISIONS = ("off", "int8", "int4")


def check_gate_share(value: float, name: str) -> None:
    """Check that a threshold is a share of gate weights, from 0 to 1; UsageError otherwise."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must be a share of the gate weights, from 0 to 1, got {value}")


@dataclass(frozen=True)
class PrecisionConfig(OptionConfig):
    """Settings that say which missing experts are approximated, and how.

    If several thresholds are set, a miss is served by the first rule in the order skip, substitute,
    low precision whose threshold is above the expert's tail weight. So each threshold must be less
    than the next; UsageError otherwise.
    """

    miss_precision: str = option(
        "off", "compute misses with a low gate weight from the low-precision copies of a pack that"
        " has them (pack --miss-precision): faster, but THE OUTPUT CHANGES, and depends on what the"
        " cache holds", None, PRECISIONS, group=INEXACT,
    )  # fmt: skip
    low_below: float | None = option(
        None, "with --miss-precision: misses of experts that, with all smaller ones of the token,"
        " have less than this share of its gate weights (default: 0.4, which is HOBBIT's T1 = 0.6)",
        "SHARE", group=INEXACT, needs="miss_precision", check=check_gate_share,
    )  # fmt: skip
    low_share: str = option(
        "12.5%", "with --miss-precision: share of the cache's memory for copies", "SHARE",
        group=INEXACT, needs="miss_precision", check=parse_share,
    )  # fmt: skip
    low_follow: bool = option(
        False, "with --miss-precision: fetch the exact expert after its copy was used, while the"
        " link is idle, so that more is exact; tokens take longer",
        group=INEXACT, needs="miss_precision",
    )  # fmt: skip
    skip_below: float = option(
        0.0, "leave out misses below this share of the gate weights, which changes the output:"
        " HOBBIT's T2 = 0.9 is 0.1 (default: none)", "SHARE", group=INEXACT, check=check_gate_share,
    )  # fmt: skip
    substitute_below: float = option(
        0.0, "compute misses below this share of the gate weights with the resident expert most"
        " often chosen with them, which changes the output (default: none)", "SHARE",
        group=INEXACT, check=check_gate_share,
    )  # fmt: skip

    def check(self) -> None:
        if self.miss_precision != "off" and self.low_below == 0:
            raise UsageError(
                "--low-below 0 computes no miss from its low-precision copy:"
                " give more than 0, or leave out --miss-precision"
            )
        at = self._thresholds()
        order = [(name, v) for name, v in (
            ("skip-below", at.skip), ("substitute-below", at.substitute), ("low-below", at.low),
        ) if v]  # fmt: skip
        for (name, value), (above, more) in pairwise(order):
            if value >= more:
                raise UsageError(f"--{name} {value:g} must be less than --{above} {more:g}")

    def approximation(self) -> Approximation | None:
        at = self._thresholds()
        return at if at.highest else None

    def proposes(self) -> bool:
        return self.low_follow

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        at = self._thresholds()
        if not at.highest:
            return None
        from greenroom.core.options.rules.precision import precision

        return precision(at, pieces)

    def _thresholds(self) -> Approximation:
        low = LOW_BELOW if self.low_below is None else self.low_below
        return Approximation(
            low if self.miss_precision != "off" else 0.0,
            self.skip_below,
            self.substitute_below,
            self.low_follow,
            self.miss_precision,
            parse_share(self.low_share, "--low-share"),
        )
