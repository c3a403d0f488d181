"""What the scheduler keeps of the step under way, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core.cache import Served
from greenroom.core.pieces import Ints
from greenroom.core.policy import Rows


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


@dataclass(slots=True)
class Step:
    """The step under way. Requests are numbered in its order."""

    now: int
    layer: int
    experts: Ints
    served: Served
    slots: Ints  # of each request: where it is computed, -1 as long as it has no slot
    ready: list[int]  # landed or resident, to be computed
    missing: dict[int, int]  # piece -> request, on its way or to be asked for
    blocked: dict[int, int]  # request -> the later request that takes over its slot
    uncomputed: int
    waiting: list[int] = field(default_factory=list)  # requests without a slot, the next one last
    passing: set[int] = field(default_factory=set)  # pieces computed in the buffer
    freed: set[int] = field(default_factory=set)  # residents whose slot the step may reuse
    waves: dict[int, list[int]] = field(default_factory=dict)  # being computed, by device
    part: int = 0  # that the wave under way computes; where there are parts there is one device
    stage: list[int] = field(default_factory=list)  # the part of each request that is to come
    seats: dict[int, int] = field(default_factory=dict)  # request -> slot of its bottom
    lacking: list[int] = field(default_factory=list)  # requests whose extra has no slot yet
    buddies: list[int] = field(default_factory=list)  # pinned to stand in for others
    late: set[int] = field(default_factory=set)  # pieces that were being prefetched
    on_host: dict[int, int] = field(default_factory=dict)  # request -> slot between two links
    lent: set[int] = field(default_factory=set)  # pieces whose slots there the step keeps
    rows: Rows | None = None  # tokens of each request
    began: dict[int, float] = field(default_factory=dict)  # when each wave was ordered
    failed: int = -1
    ending: bool = False  # cancelled or failed: waits for what is moving, then finishes
    prefill: bool = False

    @property
    def asked(self) -> int:
        """Requests that were asked of the cache; those after them get less."""
        return self.served.slots.size
