"""The cost model: what transfers and computation take on a machine. Seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Carries one chunk after another; up to `lanes` may be asked for at a time.

    A chunk occupies the link for nbytes / bandwidth and is there `latency` after that.
    """

    bandwidth: float
    latency: float = 0.0
    lanes: int = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """`expert` is the time of one expert of one step, `dense` that of the rest of one layer."""

    link: Link
    expert: float
    dense: float
    chunk_bytes: int = 4 << 20
