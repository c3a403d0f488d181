"""The cost model: what transfers and computation take on a machine. Seconds and bytes.

Time is simulated, never slept. Links and processors are queues: a link carries one chunk after
another, a processor computes one expert after another, and both go on side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # what the store cuts an expert into
COOLED = 4e-3  # seconds of a wait after which a processor is as slow as it gets


@dataclass(frozen=True, slots=True)
class Link:
    """Carries one chunk after another; up to `lanes` may be asked for at a time.

    A chunk occupies the link for nbytes / bandwidth and is there `latency` after that. So one lane
    alone waits out every latency, and enough lanes reach the full bandwidth. In a chain of links a
    chunk is passed on when it has arrived whole.
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

    def later(self, seconds: float) -> Work:
        """The same, and so many seconds more for any number of tokens measured."""
        return Work(tuple((tokens, taken + seconds) for tokens, taken in self.points))

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
            to device), each with lanes of its own
    expert: one expert of one step, by the tokens that chose it
    dense:  the rest of one layer, by the tokens of the pass
    handling: seconds of the processor for each expert that was fetched: its bytes are copied by
            the same cores and through the same memory, and a wave of its own computes it
    ahead:  seconds that a layer takes more while a predictor runs: it asks, and books
    host:   one expert by the tokens that chose it, on the processor beside the place between two
            links; None where nobody computes there
    wake:   what follows a step takes so much longer for every second of each of its waits, up to
            COOLED: threads have fallen asleep, and caches and clocks have cooled
    """

    links: tuple[Link, ...]
    expert: Work
    dense: Work
    handling: float = 0.0
    ahead: float = 0.0
    host: Work | None = None
    wake: float = 0.0

    def after(self, wait: float) -> float:
        """Seconds that computing takes longer because of a wait of so many."""
        return self.wake * min(wait, COOLED)

    @property
    def lanes(self) -> tuple[int, ...]:
        return tuple(link.lanes for link in self.links)


FREE = Costs((Link(bandwidth=float("inf")),), Work.constant(0.0), Work.constant(0.0))
