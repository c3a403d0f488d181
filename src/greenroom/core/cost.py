"""The cost model: durations of transfers and computation on a machine, in seconds and bytes.

Time is simulated: nothing waits in real time. Links and processors are queues. A link carries one
chunk after another, a processor computes one expert after another, and links and processors work at
the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # what the store cuts an expert into
COOLED = 4e-3  # seconds; longer waits slow the processor down no further


@dataclass(frozen=True, slots=True)
class Link:
    """A simulated link between memories, which carries one chunk of bytes after another.

    bandwidth: bytes per second
    latency:   seconds
    lanes:     how many chunks may be under way at once, of which one occupies the link

    A chunk occupies the link for its bytes / bandwidth, and arrives `latency` after that. With a
    single lane each chunk waits until the chunk before has arrived; with enough lanes the link
    reaches its bandwidth. In a chain of links a chunk is passed on when all of it has arrived.
    """

    bandwidth: float
    latency: float = 0.0
    lanes: int = 2


@dataclass(frozen=True, slots=True)
class Work:
    """The duration of a computation in seconds, for any number of tokens.

    points: (tokens, seconds), tokens ascending

    Between points the duration is interpolated linearly. Below the first point it is constant,
    since the weights are read once in any case. Above the last point it grows in proportion to the
    tokens.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def constant(cls, seconds: float) -> Work:
        """Make a computation that takes the same time for any number of tokens."""
        return cls(((1, seconds), (1 << 62, seconds)))

    def plus(self, seconds: float) -> Work:
        """Copy a computation's durations, with seconds added to each of them."""
        return Work(tuple((tokens, duration + seconds) for tokens, duration in self.points))

    def with_single(self, seconds: float) -> Work:
        """Copy a computation's durations, with another one for a single token."""
        later = [point for point in self.points if point[0] > 2]
        return Work(((1, seconds), (2, self.seconds(2)), *later))

    def seconds(self, tokens: int) -> float:
        """Return the duration of a computation for a number of tokens."""
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
    """Durations of a model's transfers and computations on a machine, in seconds.

    links:    from the disk to the slots, in order: one (disk to memory) or a chain (disk to host to
              device)
    expert:   the computation of one expert, for the number of tokens that chose it
    dense:    the computation of the rest of one layer, for the number of tokens of the pass
    resident: the same as `dense`, where every expert has a slot on one device; None: no other time
    pieces:   the same, where not every expert has one, while nothing is predicted
    handling: processor time for each fetched expert: the same cores copy its bytes, and it is
              computed in a call of its own
    miss:     processor time for each layer that waits for missing experts, whatever their number
    shared_miss: the same, where the host may compute some of them
    ahead:    additional time of a layer while a predictor of experts runs
    host:     the same as `expert`, on the host's processor; None if the host computes nothing
    hop:      time of the host and the links for another device than the first in a step: the step's
              inputs are copied there, and outputs back
    wake:     slowdown after a wait of the processor, per second of the wait, up to `COOLED`
              (4 ms) of it: threads have fallen asleep, caches have lost data, and clock rates have
              dropped
    """

    links: tuple[Link, ...]
    expert: Work
    dense: Work
    handling: float = 0.0
    ahead: float = 0.0
    host: Work | None = None
    wake: float = 0.0
    hop: float = 0.0
    miss: float = 0.0
    resident: Work | None = None
    pieces: Work | None = None
    shared_miss: float = 0.0

    def seconds_after_wait(self, wait: float) -> float:
        """Return by how many seconds a computation is slower after the processor has waited.

        wait: the seconds of the wait
        """
        return self.wake * min(wait, COOLED)

    @property
    def lanes(self) -> tuple[int, ...]:
        return tuple(link.lanes for link in self.links)


FREE = Costs((Link(bandwidth=float("inf")),), Work.constant(0.0), Work.constant(0.0))
