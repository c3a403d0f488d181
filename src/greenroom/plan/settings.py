"""Settings that a plan chooses among: a grid that is data, each with the flags for a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

POLICIES = (
    "next-use",
    "lru",
    "lcp",
    "hobbit",
)  # LRU, and the best on recordings
SCOPES = ("shared", "per-layer")
OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """Who is evicted, how slots are shared out, and what is fetched ahead, as options of a run.

    `prefetch` auto is guarded: it prefetches while that is faster than not to.
    """

    policy: str = "next-use"
    scope: str = "shared"
    prefetch: str = AUTO

    def options(self) -> dict[str, Any]:
        """As `LoadConfig` has them."""
        return {"policy": self.policy, "scope": self.scope, "prefetch": self.prefetch}

    def flags(self) -> str:
        return f"--policy {self.policy} --scope {self.scope} --prefetch {self.prefetch}"


DEFAULT = Setting()  # what a run takes that is told nothing
PLAIN = Setting("lru", "shared", OFF)


def grid() -> Iterator[Setting]:
    """All of them without prefetching; what is fetched ahead is decided for the best of these."""
    for policy, scope in product(POLICIES, SCOPES):
        yield Setting(policy, scope, OFF)
