"""Settings that a plan chooses among, and their command line flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

POLICIES = ("next-use", "lru", "lcp", "hobbit")  # LRU, and the best ones on recordings
SCOPES = ("shared", "per-layer")
SPLITS = ("0.5", "0.75")  # shares of a split expert in its top segment, which is cached
OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a run that a plan chooses; the defaults are those of `greenroom run`.

    policy:         eviction policy of the expert cache
    scope:          division of slots: shared, per-layer, or one number for each layer
    prefetch:       predictor of experts, off, or auto (prefetch only while that is faster)
    split:          share of each expert that is cached, with the rest fetched; or off
    miss_precision: precision of the copies that serve misses with a low gate weight; or off
    low_below:      tail weight (gate weight of the lower ranks) below which a copy serves a miss
    co_compute:     auto lets the host's processor compute misses of a GPU; or off
    """

    policy: str = "next-use"
    scope: str = "shared"
    prefetch: str = AUTO
    split: str = OFF
    miss_precision: str = OFF  # changes the output, so only if the user allows it
    low_below: float | None = None
    co_compute: str = OFF

    def options(self) -> dict[str, Any]:
        """Return the setting as keyword arguments of `LoadConfig`, without those that are off."""
        always = ("policy", "scope", "prefetch")
        values = asdict(self).items()
        return {n: value for n, value in values if n in always or value not in (OFF, None)}

    def flags(self) -> str:
        """Return the setting as command-line options of `greenroom run`."""
        named = self.options().items()
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named)


DEFAULT = Setting()  # a run without options
PLAIN = Setting("lru", "shared", OFF)


def candidate_settings() -> Iterator[Setting]:
    """Yield every combination of eviction policy and scope, without prefetching."""
    for policy, scope in product(POLICIES, SCOPES):
        yield Setting(policy, scope, OFF)
