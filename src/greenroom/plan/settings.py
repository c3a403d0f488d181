"""Settings that a plan chooses among: a grid that is data, each with the flags for a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

POLICIES = (
    "next-use",
    "lru",
    "lcp",
    "hobbit",
)  # LRU, and the best on recordings
SCOPES = ("shared", "per-layer")
SPLITS = ("0.5", "0.75")  # shares of an expert that stay
OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """Who is evicted, how slots are shared out, what is fetched ahead, where experts are cut, and
    whether the host's processor computes misses, as options of a run have it.

    `scope` may be numbers, one a layer. `prefetch` auto is guarded: it prefetches while that is
    faster than not to.
    """

    policy: str = "next-use"
    scope: str = "shared"
    prefetch: str = AUTO
    split: str = OFF
    miss_precision: str = OFF  # changes the output: only where the user allows it
    low_below: float | None = None
    co_compute: str = OFF

    def options(self) -> dict[str, Any]:
        """As `LoadConfig` has them."""
        always = ("policy", "scope", "prefetch")
        values = asdict(self).items()
        return {n: value for n, value in values if n in always or value not in (OFF, None)}

    def flags(self) -> str:
        named = self.options().items()
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named)


DEFAULT = Setting()  # of a run without options
PLAIN = Setting("lru", "shared", OFF)


def candidate_settings() -> Iterator[Setting]:
    """All of them without prefetching; what is fetched ahead is decided for the best of these."""
    for policy, scope in product(POLICIES, SCOPES):
        yield Setting(policy, scope, OFF)
