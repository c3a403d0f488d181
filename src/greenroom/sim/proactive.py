"""How long a trace takes where experts are predicted and prefetched: the event machine over all.

Nothing is decided beforehand here, as in `timed`: what is in its slot depends on when it came. So
every event is played, tens of microseconds each, by Python that holds its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from greenroom.core.buffer import Use, slots_ahead
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.events import Keep
from greenroom.core.foresight import Foresight
from greenroom.core.pieces import SEATS, Pieces, Split
from greenroom.core.policy import Policy
from greenroom.core.predictor import PassBegins, Shape
from greenroom.core.rates import Rates
from greenroom.core.scheduler import Scheduler
from greenroom.core.scope import Scope
from greenroom.core.step import Counts
from greenroom.core.stream import Stream
from greenroom.core.tiers import HostTier
from greenroom.errors import UsageError
from greenroom.predictors import AUTO, AUTOMATIC, OFF, Choice, Setting, predictor
from greenroom.sim.lesser import Lesser, check_weights, tails_of
from greenroom.sim.simulate import Clock, TraceStep
from greenroom.sim.timed import Times, by_request
from greenroom.trace import Trace

ELSEWHERE = ("steps", "requests", "hits")  # counts that a row has by other names
OF_SPLITS = ("bottoms", "bottom_hits")
OF_LESSER = ("low", "low_hits", "left_out", "substituted", "joined")
OF_BOTH = ("on_host",)
OF_FOLLOWERS = ("adopted",)
NEVER = ("failed",)  # and those of what no simulated link does


@dataclass(frozen=True, slots=True)
class Proactive:
    """Times, and what became of the prefetches. `ahead` slots could be on loan at a time;
    `accuracy` and `goodpred` are shares, None where nothing was predicted."""

    times: Times
    counts: Counts
    ahead: int
    accuracy: float | None
    goodpred: float | None
    split: bool = False
    lesser: bool = False
    co_compute: bool = False
    follow: bool = False

    def as_json(self) -> dict[str, Any]:
        left_out = ELSEWHERE + NEVER + (() if self.split else OF_SPLITS)
        left_out += (() if self.lesser else OF_LESSER) + (() if self.co_compute else OF_BOTH)
        left_out += () if self.co_compute or self.follow else OF_FOLLOWERS
        counts = {n: v for n, v in asdict(self.counts).items() if n not in left_out}
        return {
            **self.times.as_json(),
            "ahead": self.ahead,
            **counts,
            **({"inexact_share": self._inexact()} if self.lesser else {}),
            "accuracy": self.accuracy,
            "goodpred": self.goodpred,
        }

    def _inexact(self) -> float:
        c = self.counts
        return (c.low + c.left_out + c.substituted) / max(1, c.requests)


def proactive(
    trace: Trace,
    stream: Stream,
    capacity: int,
    policy: Policy,
    costs: Costs,
    expert_bytes: int,
    prefetch: str,
    *,
    ahead: int | None = None,
    scope: Scope = "shared",
    seed: int = 0,
    reset: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    host: int = 0,
    devices: int = 1,
    split: float | Sequence[float] | None = None,
    lesser: Lesser | None = None,
    co_compute: bool = False,
    stay: Sequence[int] = (),
) -> Proactive:
    """Time a trace with a predictor (`NAME[:distance]`, or `off`); `stream` is it in `runtime`
    order. `host` slots between the two links of `costs` keep experts, under the same policy. Over
    several `devices` experts are spread, and `capacity` is that of all together.

    `split` is the share of an expert that is its top, of all layers or of each: then `capacity` is
    the memory of so many whole experts. `lesser` says what misses may be served with instead of the
    exact expert; copies come out of the same memory. Up to `ahead` slots are on loan to prefetches
    (default: as a run has it). With `co_compute` misses are computed by the host's processor too,
    where that is sooner. Experts that `stay` do so once they are there. With `reset` every request
    begins with an empty cache; what was learned stays. UsageError where the predictor needs what a
    trace does not have, and where the policy must know what comes.
    """
    check_policy(policy)
    offsets = trace.offsets.tolist()
    chunks = max(1, -(-expert_bytes // chunk_bytes))
    if lesser is not None:
        _check_lesser(trace, devices, host, split)
        found = lesser.pieces(trace, expert_bytes, capacity, chunk_bytes)
        nbytes = [expert_bytes] * trace.layers
        pieces = found or Pieces.whole(offsets, nbytes, [chunks] * offsets[-1])
    elif split is None:
        nbytes = [expert_bytes] * trace.layers
        pieces = Pieces.whole(offsets, nbytes, [chunks] * offsets[-1], devices)
    else:
        if devices > 1:
            raise UsageError("split experts are on one device: leave out --devices")
        pieces = parts_of(trace, expert_bytes, split, chunk_bytes)
    if ahead is None:
        ahead = slots_ahead(trace.top_k) if capacity < offsets[-1] else 0
    follow = lesser is not None and lesser.thresholds.follow
    if prefetch == OFF and not (co_compute or follow):
        ahead = 0
    elif prefetch != OFF:
        costs = replace(costs, dense=costs.dense.later(costs.ahead))

    def empty() -> Scheduler:
        tier = HostTier(pieces, host, policy, seed=seed) if host else None
        made = Scheduler(
            pieces, capacity, policy, scope=scope, lanes=costs.lanes, ahead=ahead, seed=seed,
            host=tier, thresholds=None if lesser is None else lesser.thresholds, rates=rates,
        )  # fmt: skip
        if stay:
            made.on(Keep(np.asarray(stay, np.int64)))
        return made

    rates = Rates(costs, expert_bytes, devices) if co_compute else None

    foresight = None if prefetch == OFF else foresight_of(trace, prefetch, seed)
    clock = Clock(empty(), costs, foresight)
    spent, request = np.zeros(trace.passes), 0
    for at, steps in passes(trace, stream, tails=lesser is not None):
        if reset and at.request != request:
            clock = _emptied(clock, empty())
        request, begin = at.request, clock.now
        clock.begin(at)
        for step in steps:
            clock.run(step)
        spent[steps[0].step] = clock.now - begin
    scheduler = clock.scheduler
    ttft, gaps = by_request(trace, spent)
    counts, accuracy = scheduler.counts, scheduler.lookahead.accuracy
    times = Times(
        counts.requests,
        counts.misses,
        ttft,
        gaps,
        clock.now,
        clock.stall,
        clock.compute,
        clock.bytes_moved,
    )
    return Proactive(
        times, counts, scheduler.buffer.size, accuracy.share(), accuracy.good(), split is not None,
        lesser is not None, co_compute, follow,
    )  # fmt: skip


def _check_lesser(trace: Trace, devices: int, host: int, split: Any) -> None:
    if devices > 1 or host or split is not None:
        raise UsageError(
            "misses that are served with less are for one processor's memory: leave out --split,"
            " --devices and --host-capacity"
        )
    check_weights(trace)


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


def _emptied(clock: Clock, scheduler: Scheduler) -> Clock:
    """The clock goes on with an empty cache: what is under way is forgotten, what was learned and
    counted stays."""
    before = clock.scheduler
    for held in before.buffer.held.values():
        before.counts.dropped += held.use is Use.MOVING
        before.counts.displaced += held.use is Use.AHEAD
    before.lookahead.clear()
    before.lookahead.pace.paused()
    before.lookahead.pace.link(clock.now, 0, demanding=False, landed=False)
    scheduler.lookahead, scheduler.counts = before.lookahead, before.counts
    after = Clock(scheduler, clock.costs, clock.foresight)
    after.now, after.stall, after.compute = clock.now, clock.stall, clock.compute
    after.bytes_moved = clock.bytes_moved
    return after


def foresight_of(trace: Trace, prefetch: str, seed: int = 0) -> Foresight:
    """A predictor over a trace; those that run beside a model are replayed from its predictions.

    UsageError where the trace has not what they need.
    """
    choice = chosen(trace, prefetch)
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    if "token_ids" in choice.kind.needs and trace.token_ids is None:
        raise UsageError(
            f"predictor {choice.name} needs token ids, which this trace does not have: record them"
            " with --token-ids"
        )
    setting = Setting(shape, seed, routed=trace.experts, recorded=trace.predictions)
    return Foresight(choice.make(setting), trace.offsets.tolist())


def chosen(trace: Trace, prefetch: str) -> Choice:
    """What a name stands for over this trace: itself, or the recording of it."""
    choice = predictor(prefetch)
    if choice.kind is AUTO:
        return chosen(trace, automatic(trace))
    if choice.kind.needs.isdisjoint(("inputs", "gates", "file")):
        return choice
    if (found := _recording(trace, choice)) is None:
        raise UsageError(
            f"predictor {choice.name} runs beside a model, and this trace does not hold its"
            f" predictions: record them (trace record --predict {choice.name})"
            + (f"; it holds {', '.join(trace.predictions)}" if trace.predictions else "")
        )
    return predictor(f"recorded:of={found}")


def automatic(trace: Trace) -> str:
    """What `auto` is here: what a run takes, as far as the trace says what it would expect."""
    first, last = AUTOMATIC
    return last if _recording(trace, predictor(first)) is None else first


def _recording(trace: Trace, choice: Choice) -> str | None:
    """The trace's predictions that a predictor made: of its kind, distance and options."""
    for name, made in trace.predictions.items():
        try:
            by = predictor(name)
        except UsageError:  # not one of ours
            continue
        alike = by.kind is choice.kind and by.options == choice.options
        if alike and choice.distance in (None, made.distance):
            return name
    return None


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
