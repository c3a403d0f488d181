"""Event-driven simulation of a trace: the scheduler of a run plays every event.

Whether an expert is in its slot depends on when its transfer ended, so that nothing can be decided
beforehand, as in `timed.py`. An event takes Python tens of microseconds, with its lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from greenroom.core.build import build_scheduler
from greenroom.core.cache.buffer import slots_ahead
from greenroom.core.cache.scope import Scope
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.counts import Counts
from greenroom.core.events import Keep
from greenroom.core.options.precision import Thresholds
from greenroom.core.options.rules.rates import Rates
from greenroom.core.pieces import SEATS, Pieces, Split
from greenroom.core.policy import Policy
from greenroom.core.predictor import PassBegins
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.stream import Stream
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import UsageError
from greenroom.predictors import OFF
from greenroom.sim.clock import Clock, TraceStep
from greenroom.sim.foresight import foresight_of
from greenroom.sim.lesser import Lesser, check_weights, tails_of
from greenroom.sim.timed import Floats, Times, by_request
from greenroom.trace import Trace

ELSEWHERE = ("steps", "requests", "hits")  # counts that a row has by other names
OF_SPLITS = ("bottoms", "bottom_hits")
OF_LESSER = ("low", "low_hits", "left_out", "substituted", "joined")
OF_BOTH = ("on_host",)
OF_FOLLOWERS = ("adopted",)
NEVER = ("failed",)  # and those of what no simulated link does


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """What a simulation may have beyond a policy, a capacity and a predictor.

    reset:      every request begins with an empty cache; what was learned stays
    ahead:      slots that are on loan to prefetches at a time (default: as a run has it)
    host:       slots between two links that keep experts, under the same policy
    devices:    that experts are spread over; the capacity is that of all together
    split:      share of an expert that is its top, of all layers or of each; then the capacity is
                the memory of so many whole experts
    lesser:     what misses may be served with instead of the exact expert; copies come out of the
                same memory
    co_compute: misses are computed by the host's processor too, where that is sooner
    stay:       experts that stay once they are there
    """

    scope: Scope = "shared"
    seed: int = 0
    reset: bool = False
    ahead: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    host: int = 0
    devices: int = 1
    split: float | Sequence[float] | None = None
    lesser: Lesser | None = None
    co_compute: bool = False
    stay: Sequence[int] = ()

    @property
    def thresholds(self) -> Thresholds | None:
        return None if self.lesser is None else self.lesser.thresholds

    @property
    def follow(self) -> bool:
        """Do exact experts follow the copies that were used?"""
        return self.thresholds is not None and self.thresholds.follow


@dataclass(frozen=True, slots=True)
class EventRun:
    """Times, and what became of the prefetches. `ahead` slots could be on loan at a time;
    `accuracy` and `goodpred` are shares, None where nothing was predicted."""

    times: Times
    counts: Counts
    ahead: int
    accuracy: float | None
    goodpred: float | None
    options: EventOptions

    @classmethod
    def of(cls, trace: Trace, clock: Clock, passes: Floats, options: EventOptions) -> EventRun:
        """From the clock at the end, and the seconds of each pass."""
        scheduler, counts = clock.scheduler, clock.scheduler.counts
        times = Times(
            counts.requests, counts.misses, *by_request(trace, passes), clock.now, clock.stall,
            clock.compute, clock.bytes_moved,
        )  # fmt: skip
        accuracy, ahead = scheduler.view.accuracy, scheduler.view.loans
        return cls(times, counts, ahead, accuracy.share(), accuracy.good(), options)

    def as_json(self) -> dict[str, Any]:
        options = self.options
        lesser, co_compute = options.lesser is not None, options.co_compute
        left_out = ELSEWHERE + NEVER + (() if options.split is not None else OF_SPLITS)
        left_out += (() if lesser else OF_LESSER) + (() if co_compute else OF_BOTH)
        left_out += () if co_compute or options.follow else OF_FOLLOWERS
        counts = {n: v for n, v in asdict(self.counts).items() if n not in left_out}
        return {
            **self.times.as_json(),
            "ahead": self.ahead,
            **counts,
            **({"inexact_share": self._inexact()} if lesser else {}),
            "accuracy": self.accuracy,
            "goodpred": self.goodpred,
        }

    def _inexact(self) -> float:
        c = self.counts
        return (c.low + c.left_out + c.substituted) / max(1, c.requests)


def simulate_events(
    trace: Trace,
    stream: Stream,
    capacity: int,
    policy: Policy,
    costs: Costs,
    expert_bytes: int,
    prefetch: str,
    options: EventOptions = EventOptions(),
) -> EventRun:
    """Time a trace with a predictor (`NAME[:distance]`, or `off`); `stream` is it in `runtime`
    order. UsageError where the predictor needs what a trace does not have, and where the policy
    must know what comes."""
    check_policy(policy)
    pieces, ahead = _pieces(trace, expert_bytes, capacity, options), options.ahead
    if prefetch == OFF and not (options.co_compute or options.follow):
        ahead = 0
    elif ahead is None:
        ahead = slots_ahead(trace.top_k) if capacity < trace.offsets[-1] else 0
    if prefetch != OFF:
        costs = replace(costs, dense=costs.dense.later(costs.ahead))
    rates = Rates(costs, expert_bytes, options.devices) if options.co_compute else None

    def empty(**learned: Any) -> Scheduler:
        seed = options.seed
        tier = HostTier(pieces, options.host, policy, seed=seed) if options.host else None
        made = build_scheduler(
            pieces, capacity, policy, scope=options.scope, lanes=costs.lanes, ahead=ahead,
            seed=seed, host=tier, thresholds=options.thresholds, rates=rates, **learned,
        )  # fmt: skip
        if options.stay:
            made.on(Keep(np.asarray(options.stay, np.int64)))
        return made

    foresight = None if prefetch == OFF else foresight_of(trace, prefetch, options.seed)
    every = passes(trace, stream, tails=options.lesser is not None)
    clock, spent = _play(every, Clock(empty(), costs, foresight), empty if options.reset else None)
    return EventRun.of(trace, clock, spent, options)


def _play(
    passes: Iterator[tuple[PassBegins, list[TraceStep]]],
    clock: Clock,
    empty: Callable[..., Scheduler] | None,
) -> tuple[Clock, Floats]:
    """(the clock at the end, seconds of each pass); `empty` makes the cache of every request."""
    spent, request = [], 0
    for at, steps in passes:
        if empty is not None and at.request != request:
            clock = _emptied(clock, empty)
        request, begin = at.request, clock.now
        clock.begin(at)
        for step in steps:
            clock.run(step)
        spent.append(clock.now - begin)
    return clock, np.array(spent)


def _pieces(trace: Trace, expert_bytes: int, capacity: int, options: EventOptions) -> Pieces:
    """What is moved: whole experts, tops and bottoms, or experts and their copies."""
    chunk_bytes, devices, found = options.chunk_bytes, options.devices, None
    if options.lesser is not None:
        if devices > 1 or options.host or options.split is not None:
            raise UsageError(
                "misses that are served with less are for one processor's memory: leave out"
                " --split, --devices and --host-capacity"
            )
        check_weights(trace)
        found = options.lesser.pieces(trace, expert_bytes, capacity, chunk_bytes)
    elif options.split is not None:
        if devices > 1:
            raise UsageError("split experts are on one device: leave out --devices")
        found = parts_of(trace, expert_bytes, options.split, chunk_bytes)
    if found is not None:
        return found
    chunks, experts = max(1, -(-expert_bytes // chunk_bytes)), int(trace.offsets[-1])
    nbytes = [expert_bytes] * trace.layers
    return Pieces.whole(trace.offsets.tolist(), nbytes, [chunks] * experts, devices)


def parts_of(
    trace: Trace, expert_bytes: int, split: float | Sequence[float], chunk_bytes: int = CHUNK_BYTES
) -> Pieces:
    """A trace's experts, cut in two. UsageError where no layer is, or it has other layers."""
    cut = Split.of(expert_bytes, split, trace.layers, SEATS * trace.top_k)
    offsets, counts = trace.offsets.tolist(), trace.experts_per_layer
    chunks = [
        -(-n // chunk_bytes)
        for part in (cut.tops, cut.bottoms)
        for n in np.repeat(part, counts).tolist()
    ]
    return Pieces.parts(offsets, cut, chunks)


def check_policy(policy: Policy) -> None:
    """UsageError for policies whose decisions are made before anything moves."""
    if policy.needs_trace:
        raise UsageError(
            f"policy {policy.name} decides by the whole trace beforehand, and prefetching changes"
            " what is asked of it: simulate it without --prefetch"
        )


def _emptied(clock: Clock, empty: Callable[..., Scheduler]) -> Clock:
    """The clock goes on with an empty cache: what is under way is forgotten, what was learned and
    counted stays."""
    before = clock.scheduler
    before.empty(clock.now)
    scheduler = empty(after=before)
    after = Clock(scheduler, clock.costs, clock.foresight)
    after.now, after.stall, after.compute = clock.now, clock.stall, clock.compute
    after.bytes_moved = clock.bytes_moved
    return after


def passes(
    trace: Trace, stream: Stream, tails: bool = False
) -> Iterator[tuple[PassBegins, list[TraceStep]]]:
    """A trace in runtime order, pass by pass, as the event machine takes it; with `tails` it is
    told how much each expert matters."""
    tokens = np.diff(trace.pass_starts)
    firsts = np.searchsorted(stream.token, np.arange(trace.passes + 1))
    requests = np.searchsorted(trace.request_starts, trace.pass_starts[:-1], side="right") - 1
    for number in range(trace.passes):
        begin, end = int(trace.pass_starts[number]), int(trace.pass_starts[number + 1])
        prefill, request = bool(trace.pass_prefill[number]), int(requests[number])
        ids = None if trace.token_ids is None else trace.token_ids[begin:end].astype(np.int64)
        steps = []
        for s in range(int(firsts[number]), int(firsts[number + 1])):
            part, layer = slice(int(stream.starts[s]), int(stream.starts[s + 1])), stream.layer[s]
            steps.append(
                TraceStep(
                    number,
                    int(layer),
                    stream.pieces[part].astype(np.int64),
                    stream.rows[part] if stream.rows.size else None,
                    int(tokens[number]),
                    request,
                    stream.weights[part] if stream.weights.size else None,
                    prefill,
                    trace.experts[begin:end, layer].astype(np.int64),
                    tails_of(trace, begin, end, int(layer)) if tails and not prefill else None,
                )
            )
        yield PassBegins(request, begin, end - begin, prefill, ids), steps
