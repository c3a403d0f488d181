"""The scheduler's counters of cache hits, misses and prefetches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """The scheduler's counters of requests, hits, misses and prefetches since the start.

    A request is one expert of a step. A hit was in its slot when its step began; a hit is `useful`
    if a prefetch brought it. A prefetch ends in one of these ways; others are still under way, or
    wait for their layer:

    useful:    its expert was a hit
    late:      its expert was a miss: the transfer was not complete when the step began
    wasted:    complete, but not used by its layer's next step
    dropped:   given up before it was complete
    displaced: complete, but its slot was needed before its layer came
    failed:    the transfer failed

    Of a split expert, a hit has its top segment in its slot; `bottoms` counts requests of split
    experts, `bottom_hits` those whose bottom segment was there too. Prefetches are counted by
    piece, tops and bottoms alike.

    Of the misses, `low` were computed from a low-precision copy, `low_hits` of which were there;
    `left_out` were not computed; `substituted` were computed with another expert's weights; of
    `joined` only what their copy lacked was fetched; `on_host` were computed by the host's
    processor. A promotion (of an expert that the host computed, or of a copy to the exact expert)
    is counted as a prefetch; `adopted` promotions are complete and resident.
    """

    steps: int = 0
    requests: int = 0
    hits: int = 0
    useful: int = 0
    prefetches: int = 0
    late: int = 0
    wasted: int = 0
    dropped: int = 0
    displaced: int = 0
    failed: int = 0
    bottoms: int = 0
    bottom_hits: int = 0
    low: int = 0
    low_hits: int = 0
    left_out: int = 0
    substituted: int = 0
    joined: int = 0
    on_host: int = 0
    adopted: int = 0

    @property
    def misses(self) -> int:
        return self.requests - self.hits
