"""Small traces for the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from greenroom.core.cache.scope import Scope
from greenroom.core.cost import FREE, Costs
from greenroom.core.counts import Counts
from greenroom.core.pieces import Pieces
from greenroom.core.plan import Option
from greenroom.core.policy import Policy
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.stream import Stream
from greenroom.core.transfers.tiers import HostTier
from greenroom.sim.clock import Clock, TraceStep
from greenroom.trace import Trace


def trace(
    requests: list[list[int]],
    *,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
) -> Trace:
    """Random routing; a request is a list of passes, by their tokens: -5 is a prompt of five."""
    rng = np.random.default_rng(seed)
    passes = [n for request in requests for n in request]
    tokens = int(np.abs(passes).sum())
    scores = rng.random((tokens, layers, experts)) + np.linspace(0, 0.5, experts)
    return Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.uint8),
        experts_per_layer=np.full(layers, experts),
        request_starts=starts([sum(map(abs, request)) for request in requests]),
        pass_starts=starts([abs(n) for n in passes]),
        pass_prefill=np.array([n < 0 for n in passes]),
        labels=("",) * len(requests),
    )


def of(experts: list[list[list[int]]], requests: list[list[int]], most: int = 4) -> Trace:
    """Routing as given, [tokens][layers][top_k]; requests as in `trace`."""
    shape = trace(requests, layers=len(experts[0]), experts=most, top_k=len(experts[0][0]))
    return Trace(
        np.array(experts, np.uint8),
        shape.experts_per_layer,
        shape.request_starts,
        shape.pass_starts,
        shape.pass_prefill,
        shape.labels,
    )


def starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def steps(trace: Trace, stream: Stream) -> list[TraceStep]:
    """A stream in runtime order as the event machine takes it."""
    tokens = np.diff(trace.pass_starts)
    trace_steps = []
    for s in range(stream.layer.size):
        part = slice(int(stream.starts[s]), int(stream.starts[s + 1]))
        rows = stream.rows[part] if stream.rows.size else None
        number = int(stream.token[s])
        trace_steps.append(
            TraceStep(number, int(stream.layer[s]), stream.pieces[part].astype(np.int64), rows,
                      int(tokens[number]))
        )  # fmt: skip
    return trace_steps


@dataclass
class Result:
    """Counts in requests, times in seconds. `stall` is time with nothing to compute but a wait;
    `on_host` misses were computed by the host's processor.

    `pass_ends[i]` is when the i-th pass was over; with it go `bytes_moved` and `miss_ids`.
    """

    policy: str
    capacity: int
    requests: int = 0
    misses: int = 0
    seconds: float = 0.0
    stall: float = 0.0
    bytes_moved: int = 0
    compute: float = 0.0
    on_host: int = 0
    miss_ids: list[int] = field(default_factory=list)
    pass_ends: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

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
    scope: Scope = "shared",
    pin: str = "step",
    seed: int = 0,
    host: HostTier | None = None,
    options: Sequence[Option] = (),
) -> Result:
    """Run the steps one after another. Requests are in `runtime` order: ascending id in a step.

    `host` keeps pieces between the two links of `costs`. `pieces` says over how many devices they
    are spread; `costs` are those of each, and `capacity` is of all together.
    """
    scheduler = Scheduler(
        pieces, capacity, policy, scope=scope, pin=pin, lanes=costs.lanes, seed=seed, host=host,
        options=options,
    )  # fmt: skip
    clock = Clock(scheduler, costs)
    ends: list[float] = []
    under_way = None
    for step in steps:
        if under_way not in (None, step.step):
            ends.append(clock.now)
        under_way = step.step
        clock.run(step)
    if under_way is not None:
        ends.append(clock.now)
    counts = scheduler.counts
    return Result(
        policy.name,
        capacity,
        counts.requests,
        counts.misses,
        clock.now,
        clock.stall,
        clock.bytes_moved,
        clock.compute,
        counts.on_host,
        clock.fetched,
        ends,
        counts,
    )
