"""Event-driven simulation of a trace, in which the runtime's scheduler handles every event.

With prefetching, an access to an expert is a hit only if the expert's transfer has ended in time.
So misses cannot be computed before the times, as `timed.py` does. An event takes tens of
microseconds of Python, under the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from greenroom.core.build import build_scheduler
from greenroom.core.cache.buffer import default_borrow_limit
from greenroom.core.cache.scope import Scope
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import NO_OPTIONS, SchedulerConfig
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.counts import Counts
from greenroom.core.events import Pinned
from greenroom.core.home_devices import DevicePlacement
from greenroom.core.pieces import SECONDARY_SLOTS_PER_CHOICE, Pieces, Split
from greenroom.core.policy import Arrays, Policy
from greenroom.core.predictor import PassStart, Shape
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.stream import Stream
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import UsageError
from greenroom.predictors import OFF, PredictorSetup, predictor
from greenroom.sim.approximation import CopySizes, check_weights, tail_weights_of
from greenroom.sim.clock import Clock, TraceStep
from greenroom.sim.device_placement import place_experts
from greenroom.sim.foresight import (
    CountedForesight,
    Divide,
    Reconfiguration,
    foresight_of,
    teach_predictor,
)
from greenroom.sim.timed import Floats, SimulatedTimes, learned_by_policy, times_by_request
from greenroom.trace import Trace
from greenroom.trace import stream as to_stream

RENAMED_COUNTS = ("steps", "requests", "hits")  # counts that a row has under other names
SPLIT_COUNTS = ("bottoms", "bottom_hits")
APPROXIMATION_COUNTS = ("low", "low_hits", "skipped", "substituted", "joined")
HOST_COUNTS = ("on_host",)
PROMOTION_COUNTS = ("promoted",)
# Links do not fail, requests do not pause, and no router is biased.
UNUSED_COUNTS = ("failed", "idle", "idle_used", "rerouted")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """Options of an event-driven simulation, besides policy, capacity and predictor.

    scope:       one cache for all layers ("shared"), or one per layer
    seed:        seed of policies and predictors that draw random numbers
    reset:       whether every prompt begins with an empty cache; what was learned stays
    ahead:       most slots of the cache that prefetched experts may take at a time; None: as in a
                 real run
    chunk_bytes: largest transfer; larger experts are moved in several chunks
    host:        slots of a second cache, in host memory between two links, with the same policy;
                 each has room for an expert, and for its low-precision copy if there are copies
    devices:     number of devices that share the experts; the capacity is their total
    split:       share of an expert's bytes in its top segment, a number or one per layer; top and
                 bottom segments are cached separately, in the memory of `capacity` whole experts
    config:      options of the scheduler, such as approximation of misses and co-computing
    low:         bytes of a low-precision copy as a share of its expert's; None: by the precision,
                 for experts of 16 bits per weight
    nested:      whether experts are int8 and contain their copies
    stay:        ids of experts that are never evicted once they are in the cache
    history:     an earlier trace, from which policy and predictor have learned; the cache is empty
    tau:         decoded tokens after which the slots are divided among layers anew, between two
                 prompts; 0: never
    divide:      computes this division from counts of used and predicted experts
    """

    scope: Scope = "shared"
    seed: int = 0
    reset: bool = False
    ahead: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    host: int = 0
    devices: int = 1
    split: float | Sequence[float] | None = None
    config: SchedulerConfig = NO_OPTIONS
    low: float | None = None
    nested: bool = False
    stay: Sequence[int] = ()
    history: Trace | None = None
    tau: int = 0
    divide: Divide | None = None

    @property
    def approximation(self) -> Approximation | None:
        """Return how missing experts may be approximated; None if all are computed exactly."""
        return self.config.approximation()


@dataclass(frozen=True, slots=True)
class EventRun:
    """Result of an event-driven simulation: times, counts, and accuracy of predictions.

    times:    simulated seconds and stalls
    counts:   expert requests, hits and misses; prefetches by how they ended
    ahead:    most slots of the cache that prefetched experts could take at a time
    accuracy: share of needed experts that were predicted; None if nothing was predicted
    fetch_rate: share of predicted, not resident experts that were prefetched in time; None likewise
    placement: of experts on several devices
    goodpred: mean of ProMoE's GOODPRED over layers (see `core.prefetch.accuracy`); None likewise
    """

    times: SimulatedTimes
    counts: Counts
    ahead: int
    accuracy: float | None
    fetch_rate: float | None
    goodpred: float | None
    options: EventOptions
    placement: DevicePlacement

    def as_json(self) -> dict[str, Any]:
        options = self.options
        approximated, co_compute = options.approximation is not None, options.config.uses_host()
        omitted = (
            RENAMED_COUNTS + UNUSED_COUNTS + (() if options.split is not None else SPLIT_COUNTS)
        )
        omitted += (() if approximated else APPROXIMATION_COUNTS) + (
            () if co_compute else HOST_COUNTS
        )
        omitted += () if co_compute or options.config.proposes() else PROMOTION_COUNTS
        counts = {n: v for n, v in asdict(self.counts).items() if n not in omitted}
        return {
            **self.times.as_json(),
            "ahead": self.ahead,
            **counts,
            **({"inexact_share": self._inexact()} if approximated else {}),
            **({"device_placement": self.placement.name} if options.devices > 1 else {}),
            "accuracy": self.accuracy,
            "fetch_rate": self.fetch_rate,
            "goodpred": self.goodpred,
        }

    def _inexact(self) -> float:
        c = self.counts
        return (c.low + c.skipped + c.substituted) / max(1, c.requests)


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
    """Simulate a trace event by event, with prefetching or without.

    stream:       the trace's expert requests, one step per forward pass and layer
    capacity:     size of the cache in experts
    costs:        speeds of the simulated machine
    expert_bytes: bytes of an expert
    prefetch:     name of a predictor, such as "markov" or "markov:2" (2 layers ahead), or "off"

    Raises UsageError if the trace lacks data that the predictor needs, or if the policy needs to
    know the whole trace beforehand.
    """
    check_policy(policy)
    placement = _placement(trace, capacity, costs, expert_bytes, options)
    pieces, ahead = _pieces(trace, expert_bytes, capacity, options, placement.name), options.ahead
    both = options.config.uses_host()
    if prefetch == OFF and not (both or options.config.proposes()):
        ahead = 0
    elif ahead is None:
        ahead = default_borrow_limit(trace.top_k) if capacity < trace.offsets[-1] else 0
    if prefetch != OFF:
        costs = replace(costs, dense=costs.dense.plus(costs.ahead))

    learned: Arrays = {}
    if options.history is not None:
        requests, scope = to_stream(options.history, "runtime"), options.scope
        learned = learned_by_policy(requests, pieces, capacity, policy, scope, options.seed)

    def new_scheduler(**before: Any) -> Scheduler:
        seed = options.seed
        tier = HostTier(pieces, options.host, policy, seed=seed) if options.host else None
        scheduler = build_scheduler(
            pieces, capacity, policy, options.config, costs=costs if both else None,
            expert_bytes=expert_bytes, top_k=trace.top_k, scope=options.scope, lanes=costs.lanes,
            ahead=ahead, seed=seed, host=tier, **before,
        )  # fmt: skip
        if learned:
            scheduler.view.restore_learned(learned)
        if options.stay:
            scheduler.on(Pinned(np.asarray(options.stay, np.int64)))
        return scheduler

    foresight = None if prefetch == OFF else _foresight(trace, prefetch, options)
    reconfiguration = _reconfiguration(trace, foresight, options)
    if reconfiguration is not None:
        foresight = reconfiguration.counted
    trace_passes = passes(trace, stream, tail_weights=options.approximation is not None)
    clock = Clock(new_scheduler(), costs, foresight)
    spent = _simulate_passes(
        trace_passes, clock, new_scheduler if options.reset else None, reconfiguration
    )
    view = clock.scheduler.view
    counts = view.counted()
    times = SimulatedTimes(
        counts.requests, counts.misses, *times_by_request(trace, spent), clock.now, clock.stall,
        clock.compute, clock.bytes_moved,
    )  # fmt: skip
    accuracy = view.accuracy
    return EventRun(
        times, counts, view.borrow_limit, accuracy.share(), accuracy.fetch_rate(),
        accuracy.good(), options, placement,
    )  # fmt: skip


def _foresight(trace: Trace, prefetch: str, options: EventOptions) -> Foresight:
    """Build the predictor of a simulation, which has learned from the earlier trace, if any."""
    foresight, history = foresight_of(trace, prefetch, options.seed), options.history
    if history is not None:
        earlier = foresight_of(history, prefetch, options.seed)
        teach_predictor(foresight, earlier, list(passes(history, to_stream(history, "runtime"))))
    return foresight


def _reconfiguration(
    trace: Trace, foresight: Foresight | None, options: EventOptions
) -> Reconfiguration | None:
    """Build what divides the slots anew between requests, and counts predictions for it."""
    if not options.tau or options.divide is None:
        return None
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    chosen = foresight.predictor if foresight else predictor(OFF).build(PredictorSetup(shape))
    counted = CountedForesight(chosen, trace.offsets.tolist())
    return Reconfiguration(counted, options.tau, options.divide, options.scope)


def _simulate_passes(
    passes: Iterator[tuple[PassStart, list[TraceStep]]],
    clock: Clock,
    new_scheduler: Callable[..., Scheduler] | None,
    reconfiguration: Reconfiguration | None,
) -> Floats:
    """Simulate the forward passes of a trace in turn; return the seconds of each pass.

    If requests begin with an empty cache, `new_scheduler` builds the scheduler of each request but
    the first. It continues the learned state and the counts of the scheduler before.
    `reconfiguration` divides the slots among layers between requests.
    """
    spent, request = [], 0
    for at, steps in passes:
        if new_scheduler is not None and at.request != request:
            before = clock.scheduler
            before.empty(clock.now)
            clock.restart(new_scheduler(after=before))
        if reconfiguration is not None and at.request != request:
            reconfiguration.between_requests(clock)
        request, begin = at.request, clock.now
        clock.begin(at)
        for step in steps:
            clock.run(step)
        spent.append(clock.now - begin)
    return np.array(spent)


def _placement(
    trace: Trace, capacity: int, costs: Costs, expert_bytes: int, options: EventOptions
) -> DevicePlacement:
    """Return the placement of experts on the simulated devices."""
    named, devices = options.config.device_placement, options.devices
    return place_experts(named, trace, lambda pieces: capacity, costs, expert_bytes, devices)


def _pieces(
    trace: Trace, expert_bytes: int, capacity: int, options: EventOptions, placement: str
) -> Pieces:
    """List what can be cached: whole experts, segments of experts, or experts and copies."""
    chunk_bytes, devices, parts = options.chunk_bytes, options.devices, None
    if (at := options.approximation) is not None:
        if options.split is not None or options.config.uses_host():
            raise UsageError(
                "a simulation with --low-below, --skip-below or --substitute-below supports only"
                " whole experts and one processor: leave out --split and --co-compute"
            )
        check_weights(trace)
        sizes = CopySizes.of(at, options.nested, options.low)
        parts = sizes.pieces(trace, expert_bytes, capacity, chunk_bytes, devices)
    elif options.split is not None:
        parts = split_pieces(trace, expert_bytes, options.split, chunk_bytes, devices)
    if parts is not None:
        return parts
    chunks, experts = max(1, -(-expert_bytes // chunk_bytes)), int(trace.offsets[-1])
    nbytes = [expert_bytes] * trace.layers
    return Pieces.unsplit(
        trace.offsets.tolist(), nbytes, [chunks] * experts, devices,
        placement=placement,
    )  # fmt: skip


def split_pieces(
    trace: Trace,
    expert_bytes: int,
    split: float | Sequence[float],
    chunk_bytes: int = CHUNK_BYTES,
    devices: int = 1,
) -> Pieces:
    """Split each expert of a trace into two segments, cached separately.

    `split` is the top segment's share of an expert's bytes: one number, or one per layer. Raises
    UsageError if it has another number of layers than the trace.
    """
    cut = Split.of(expert_bytes, split, trace.layers, SECONDARY_SLOTS_PER_CHOICE * trace.top_k)
    sizes = np.repeat((cut.tops, cut.bottoms), trace.experts_per_layer, axis=1).reshape(-1)
    chunks = [-(-n // chunk_bytes) for n in sizes.tolist()]
    return Pieces.with_split(trace.offsets.tolist(), cut, chunks, devices)


def check_policy(policy: Policy) -> None:
    """Raise UsageError for an eviction policy that must know the whole trace beforehand."""
    if policy.needs_trace:
        raise UsageError(
            f"policy {policy.name} must know all expert requests beforehand, and prefetching"
            " changes them: simulate this policy without --prefetch, and without other options"
            " whose effect depends on times, such as --split or --expert-order"
        )


def passes(
    trace: Trace, stream: Stream, tail_weights: bool = False
) -> Iterator[tuple[PassStart, list[TraceStep]]]:
    """Yield each forward pass of a trace, with its steps (one per MoE layer).

    With `tail_weights`, steps of decoded tokens have the importance of each expert
    (core/gates.py).
    """
    tokens = np.diff(trace.pass_starts)
    firsts = np.searchsorted(stream.token, np.arange(trace.passes + 1))
    for number in range(trace.passes):
        begin, end = int(trace.pass_starts[number]), int(trace.pass_starts[number + 1])
        prefill, request = bool(trace.pass_prefill[number]), int(trace.pass_requests[number])
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
                    tail_weights_of(trace, begin, end, int(layer))
                    if tail_weights and not prefill
                    else None,
                )
            )
        yield PassStart(request, begin, end - begin, prefill, ids), steps
