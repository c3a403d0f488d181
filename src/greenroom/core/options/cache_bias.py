"""Settings of the bias of routers towards experts in the cache.

The rule itself is in `core.options.rules.cache_bias`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.core.config.base import Approximation, OptionConfig
from greenroom.option import INEXACT, option, within

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option


@dataclass(frozen=True)
class CacheBiasConfig(OptionConfig):
    """Settings of the bias of routers towards experts in the cache."""

    cache_bias: float = option(
        0.0, "while decoding, let routers prefer experts in the cache: add this share of the range"
        " of a token's scores to theirs. The token's two likeliest experts are always used. This"
        " changes the output; a simulation needs a recording of such a run (default: none)",
        "SHARE", group=INEXACT, check=within(0, 1),
    )  # fmt: skip

    def approximation(self) -> Approximation | None:
        return Approximation(bias=self.cache_bias) if self.cache_bias else None

    def build(self, pieces: Pieces, costs: Costs | None, expert_bytes: int) -> Option | None:
        if not self.cache_bias:
            return None
        from greenroom.core.options.rules.cache_bias import CacheBias

        return CacheBias(self.cache_bias)
