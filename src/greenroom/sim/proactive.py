"""How long a trace takes where experts are predicted and prefetched: the event machine over all.

Nothing is decided beforehand here, as in `timed`: what is in its slot depends on when it came. So
every event is played, tens of microseconds each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from greenroom.core.buffer import slots_ahead
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.foresight import Foresight
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy
from greenroom.core.predictor import PassBegins, Shape
from greenroom.core.scheduler import Counts, Scheduler
from greenroom.core.stream import Stream
from greenroom.errors import UsageError
from greenroom.predictors import Setting, predictor
from greenroom.sim.simulate import Clock, TraceStep
from greenroom.sim.timed import Times, by_request
from greenroom.trace import Trace


@dataclass(frozen=True, slots=True)
class Proactive:
    """Times, and what became of the prefetches. `accuracy` and `goodpred` are shares, None where
    nothing was predicted."""

    times: Times
    counts: Counts
    accuracy: float | None
    goodpred: float | None

    def as_json(self) -> dict[str, Any]:
        counts = asdict(self.counts)
        kept = {name: counts[name] for name in counts if name not in ("steps", "requests", "hits")}
        return {
            **self.times.as_json(),
            **kept,
            "accuracy": self.accuracy,
            "goodpred": self.goodpred,
        }


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
    scope: str = "shared",
    seed: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Proactive:
    """Time a trace with a predictor (`NAME[:distance]`); `stream` is it in `runtime` order.

    `ahead` of the capacity are the prefetch buffer's (default: as a run has it). UsageError where
    the predictor needs what a trace does not have.
    """
    offsets = trace.offsets.tolist()
    chunks = max(1, -(-expert_bytes // chunk_bytes))
    pieces = Pieces.whole(offsets, [expert_bytes] * trace.layers, [chunks] * offsets[-1])
    if ahead is None:
        ahead = slots_ahead(trace.top_k)
    scheduler = Scheduler(
        pieces, capacity, policy, scope=scope, lanes=costs.lanes, ahead=ahead, seed=seed
    )
    clock = Clock(scheduler, costs, foresight_of(trace, prefetch, seed))
    spent = np.zeros((trace.passes, 1))
    for at, steps in passes(trace, stream):
        begin = clock.now
        clock.begin(at)
        for step in steps:
            clock.run(step)
        spent[steps[0].step] = clock.now - begin
    ttft, gaps = by_request(trace, spent[:, 0])
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
    return Proactive(times, counts, accuracy.share(), accuracy.good())


def foresight_of(trace: Trace, prefetch: str, seed: int = 0) -> Foresight:
    """A predictor that can be replayed over a trace. UsageError where the trace lacks its needs."""
    choice = predictor(prefetch)
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    needs = choice.kind.needs
    for need, what in (("gates", "the model's routers"), ("file", "the file that was trained")):
        if need in needs and choice.kind.name not in trace.predictions:
            raise UsageError(
                f"predictor {choice.name} needs {what}, which a trace does not have: record its"
                f" predictions (trace record --predict {choice.name}) and replay them by"
                f" recorded:name={choice.kind.name}"
            )
    if "token_ids" in needs and trace.token_ids is None:
        raise UsageError(
            f"predictor {choice.name} needs token ids, which this trace does not have: record them"
            " with --token-ids"
        )
    setting = Setting(shape, seed, routed=trace.experts, recorded=trace.predictions)
    return Foresight(choice.make(setting), trace.offsets.tolist())


def passes(trace: Trace, stream: Stream) -> Iterator[tuple[PassBegins, list[TraceStep]]]:
    """A trace in runtime order, pass by pass, as the event machine takes it."""
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
                )
            )
        yield PassBegins(request, begin, end - begin, prefill, ids), steps
