"""Replay steps against a cache: the same scheduler as the runtime, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from greenroom.core.cost import Costs, Link
from greenroom.core.events import (
    Action,
    Compute,
    Computed,
    Event,
    Finish,
    Landed,
    Routed,
    StartChunk,
)
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.scheduler import Scheduler

FREE = Costs(Link(bandwidth=float("inf")), expert=0.0, dense=0.0)


class TraceStep(NamedTuple):
    """One layer of one pass: dense expert ids, ascending and distinct."""

    step: int
    layer: int
    experts: Ints


@dataclass
class Result:
    """Counts in requests, times in seconds. `stall` is time with nothing to compute but a wait."""

    policy: str
    capacity: int
    requests: int = 0
    misses: int = 0
    seconds: float = 0.0
    stall: float = 0.0
    bytes_moved: int = 0
    miss_ids: list[int] = field(default_factory=list)

    @property
    def miss_ratio(self) -> float:
        return self.misses / self.requests if self.requests else 0.0


def simulate(
    steps: Iterable[TraceStep],
    pieces: Pieces,
    capacity: int,
    policy: Policy,
    *,
    costs: Costs = FREE,
    scope: str = "shared",
    pin: str = "step",
    seed: int = 0,
) -> Result:
    """Run the steps one after another. Requests are in `runtime` order: ascending id in a step."""
    scheduler = Scheduler(
        pieces, capacity, policy, scope=scope, pin=pin, lanes=costs.link.lanes, seed=seed
    )
    clock = _Clock(scheduler, costs)
    for step in steps:
        clock.run(Routed(step.step, step.layer, step.experts))
    counts = scheduler.counts
    return Result(
        policy.name,
        capacity,
        counts.requests,
        counts.misses,
        clock.now,
        clock.stall,
        clock.bytes_moved,
        clock.fetched,
    )


class _Clock:
    """Simulated time: an event heap, one compute unit and one link."""

    def __init__(self, scheduler: Scheduler, costs: Costs) -> None:
        self.scheduler, self.costs = scheduler, costs
        self.now = self.stall = 0.0
        self.bytes_moved = 0
        self.fetched: list[int] = []
        self._heap: list[tuple[float, int, Event]] = []
        self._serial = 0
        self._link_free = 0.0

    def run(self, routed: Routed) -> None:
        """One step, from its routing to its end."""
        self.now += self.costs.dense
        finished = self._carry_out(self.scheduler.on(routed))
        while not finished:
            idle = self.scheduler.step is not None and not self.scheduler.step.wave
            due, _, event = heapq.heappop(self._heap)
            if idle:
                self.stall += due - self.now
            self.now = due
            finished = self._carry_out(self.scheduler.on(event))

    def _carry_out(self, actions: list[Action]) -> bool:
        finished = False
        for action in actions:
            match action:
                case StartChunk(lane, piece, _, chunk):
                    self._at(self._arrival(piece, chunk), Landed(lane, piece))
                    if chunk == 0:
                        self.fetched.append(piece)
                case Compute(experts, _):
                    self._at(self.now + experts.size * self.costs.expert, Computed())
                case Finish():
                    finished = True
        return finished

    def _arrival(self, piece: int, chunk: int) -> float:
        """Chunks of a piece are equal but for the last; the link carries one at a time."""
        total, chunks = (
            int(self.scheduler.pieces.nbytes[piece]),
            int(self.scheduler.pieces.chunks[piece]),
        )
        nbytes = total // chunks + (total % chunks if chunk == chunks - 1 else 0)
        self.bytes_moved += nbytes
        self._link_free = max(self.now, self._link_free) + nbytes / self.costs.link.bandwidth
        return self._link_free + self.costs.link.latency

    def _at(self, due: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, event))
