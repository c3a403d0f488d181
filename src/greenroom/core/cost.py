"""The cost model: what transfers and computation take on a machine. Seconds and bytes.

Time is simulated, never slept. Links and processors are queues: a link carries one chunk after
another, a processor computes one expert after another, and both go on side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # what the store cuts an expert into


@dataclass(frozen=True, slots=True)
class Link:
    """Carries one chunk after another; up to `lanes` may be asked for at a time.

    A chunk occupies the link for nbytes / bandwidth and is there `latency` after that. So one lane
    alone waits out every latency, and enough lanes reach the full bandwidth.
    """

    bandwidth: float
    latency: float = 0.0
    lanes: int = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a computation takes for so many tokens: straight lines between points.

    `points` are (tokens, seconds), tokens ascending. Below the first it takes what the first does
    (the weights are read once in any case), above the last it grows in proportion.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def constant(cls, seconds: float) -> Work:
        """The same time for one token; many tokens take it too."""
        return cls(((1, seconds), (1 << 62, seconds)))

    def seconds(self, tokens: int) -> float:
        above = bisect_left(self.points, (tokens, 0.0))
        if above == 0:
            return self.points[0][1]
        t0, s0 = self.points[above - 1]
        if above == len(self.points):
            return s0 * tokens / t0
        t1, s1 = self.points[above]
        return s0 + (s1 - s0) * (tokens - t0) / (t1 - t0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model's experts cost on a machine.

    links:  from the store to the slots, in order: one (disk to memory) or a chain (disk to host
            to device). The first one's lanes say how many chunks are on their way at a time.
    expert: one expert of one step, by the tokens that chose it
    dense:  the rest of one layer, by the tokens of the pass
    """

    links: tuple[Link, ...]
    expert: Work
    dense: Work

    @property
    def lanes(self) -> int:
        return self.links[0].lanes


FREE = Costs((Link(bandwidth=float("inf")),), Work.constant(0.0), Work.constant(0.0))


class Chain:
    """The queues of a chain of links. A chunk is passed on when it has arrived whole."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._free = [0.0] * len(self._links)

    def send(self, nbytes: int, now: float) -> float:
        """When a chunk that starts now is there.

        Every link delays all chunks alike, so that they reach the next link in the order in which
        they started and its queue can be reckoned at once.
        """
        for i, link in enumerate(self._links):
            self._free[i] = max(now, self._free[i]) + nbytes / link.bandwidth
            now = self._free[i] + link.latency
        return now
