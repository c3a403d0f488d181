"""The scheduler's counters of cache hits, misses and prefetches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """The scheduler's counters of requests, hits, misses and prefetches since the start.

    A request is one expert of a step (one pass at one layer). It is a hit if the expert was
    completely in a slot when the step began: resident in the cache, or prefetched to a borrowed
    slot. A prefetch ends in one of seven ways, unless it is under way or waits for its layer:

    useful:    its expert was a hit
    late:      its expert was a miss: the transfer was not complete when the step began
    wasted:    complete, but not used by its layer's next step
    dropped:   given up before it was complete
    displaced: complete, but its slot was needed before its layer came
    failed:    the transfer failed
    idle:      read while no request was computed, and resident since
    idle_used: of these, experts that were requested before they were evicted

    A split expert is a hit if its top segment was in its slot. Prefetches of top and bottom
    segments are counted one by one.

    bottoms:     requests of split experts
    bottom_hits: of these, requests whose bottom segment was in its slot too

    Misses that were not simply fetched to the device:

    low:         computed from a low-precision copy
    low_hits:    of these, misses whose copy was in memory
    skipped:    not computed
    substituted: computed with another expert's weights
    joined:      exact, but only what the low-precision copy lacks was fetched
    on_host:     computed by the host's processor

    Requests that would not have been made without an option that changes routers' choices:

    rerouted:    for a token whose router preferred another expert

    A promotion fetches an expert that was computed on the host or from its copy. It is counted as a
    prefetch; `promoted` counts promotions that are complete and resident.
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
    skipped: int = 0
    substituted: int = 0
    joined: int = 0
    on_host: int = 0
    promoted: int = 0
    rerouted: int = 0
    idle: int = 0
    idle_used: int = 0

    @property
    def misses(self) -> int:
        return self.requests - self.hits
