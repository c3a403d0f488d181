"""Settings that a plan chooses among, and their command line flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

POLICIES = ("next-use", "lru", "lcp", "hobbit")  # LRU, and the best ones on recordings
SCOPES = ("shared", "per-layer")
SPLITS = ("0.5", "0.75")  # shares of an expert in its top segment, which stays
OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run: eviction policy, scope, prefetching, split, approximation, co-computing.

    Fields are options of a run. `scope` may be numbers, one a layer. With `prefetch` auto a run
    prefetches only while that is faster.
    """

    policy: str = "next-use"
    scope: str = "shared"
    prefetch: str = AUTO
    split: str = OFF
    miss_precision: str = OFF  # changes the output, so only if the user allows it
    low_below: float | None = None
    co_compute: str = OFF

    def options(self) -> dict[str, Any]:
        """Return a run's setting as options of `LoadConfig`."""
        always = ("policy", "scope", "prefetch")
        values = asdict(self).items()
        return {n: value for n, value in values if n in always or value not in (OFF, None)}

    def flags(self) -> str:
        """Return a run's setting as command line flags."""
        named = self.options().items()
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named)


DEFAULT = Setting()  # a run without options
PLAIN = Setting("lru", "shared", OFF)


def candidate_settings() -> Iterator[Setting]:
    """Yield all candidate settings without prefetching, which is tried with the best of them."""
    for policy, scope in product(POLICIES, SCOPES):
        yield Setting(policy, scope, OFF)
