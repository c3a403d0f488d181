"""Counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened since the start.

    Requests are experts of steps; a hit was in its slot when it was asked for, and `useful` ones
    because they had been prefetched. Prefetches that were begun end as useful, `late` (still on its
    way when asked for: a miss), `wasted` (whole, but not asked for by its layer's next step),
    `dropped` (not whole, and not asked for), `displaced` (whole, but the slot was needed sooner) or
    `failed`; others are under way or wait for their layer.

    Where experts are split a hit has its top in its slot; of the `bottoms` that requests had
    `bottom_hits` were there too. Prefetches are counted by the piece, tops and bottoms alike.

    Of the misses `low` were computed from a low-precision copy, which `low_hits` times was there,
    `left_out` not computed at all, and `substituted` computed with another expert's weights;
    `joined` ones came as what their copy lacked.
    Of the misses `on_host` were computed by the host's processor. What follows such a one to the
    device, or an exact expert its copy, is counted as a prefetch; `adopted` ones are there, and
    residents from then on.
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
