"""Simulated times of a trace on a machine: TTFT, TPOT and stalls of every request.

The compiled replay decides first which requests miss. Then one compiled call times all steps; a
step that uses a slot twice is timed by the runtime's event machine, which is given these decisions.
`event_driven.py` runs the event machine over all steps; it gives the same times, a thousand times
slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.cache import Cache, ServedStep
from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Policy
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.stream import Stream
from greenroom.policies import policy as policy_of
from greenroom.sim.clock import Clock, TraceStep
from greenroom.sim.replay import replay
from greenroom.sim.steps import step_times
from greenroom.trace import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Simulated seconds and bytes of a run that serves R requests in turn.

    ttft [R]: from a request's start to the end of its prompt's passes (of its first pass, where
              the trace has no prompts)
    gaps [D]: the time of each later decode pass, which is the time between two tokens
    stall:    time spent waiting with nothing to compute
    """

    requests: int  # for one expert each
    misses: int
    ttft: Floats
    gaps: Floats
    seconds: float
    stall: float
    compute: float
    bytes_moved: int

    def as_json(self) -> dict[str, float | int | None]:
        """Return simulated times as fields of JSON, as in `greenroom run`.

        `ttft_s` and `tpot_s` are medians.
        """
        return {
            **_statistics("ttft", self.ttft),
            **_statistics("tpot", self.gaps),
            "tokens_per_s": self.gaps.size / float(self.gaps.sum()) if self.gaps.any() else None,
            "stall_s": self.stall,
            "compute_s": self.compute,
            "seconds": self.seconds,
            "bytes_moved": self.bytes_moved,
        }


def _statistics(name: str, values: Floats) -> dict[str, float | None]:
    measured = values.size > 0
    return {
        f"{name}_s": float(np.median(values)) if measured else None,
        f"{name}_mean_s": float(np.mean(values)) if measured else None,
        f"{name}_p95_s": float(np.percentile(values, 95)) if measured else None,
    }


def time_trace(
    trace: Trace,
    stream: Stream,
    capacity: int,
    policy: Policy,
    costs: Costs,
    expert_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    **how: Any,
) -> SimulatedTimes:
    """Simulate the time that a trace takes; `stream` has its requests in `runtime` order.

    An expert of `expert_bytes` comes in chunks of at most `chunk_bytes`. `how` (`scope`, `pin`,
    `seed`, `reset`) and UsageError are as in `replay`.
    """
    missed, slots = _decide(stream, trace.offsets, capacity, policy, **how)
    each = StepTimer(trace.offsets, expert_bytes, chunk_bytes, costs)
    seconds, stall, compute = _step_seconds(trace, stream, missed, slots, each).T
    ends = np.zeros(trace.passes + 1)
    np.add.at(ends, stream.token + 1, seconds)
    misses = int(missed.sum())
    return SimulatedTimes(
        missed.size,
        misses,
        *times_by_request(trace, ends[1:]),
        float(seconds.sum()),
        float(stall.sum()),
        float(compute.sum()),
        misses * expert_bytes,
    )


def times_by_request(trace: Trace, passes: Floats) -> tuple[Floats, Floats]:
    """Split the times of passes [P] into TTFT and decode times of requests.

    Returns (TTFT of each request, time of each later decode pass).
    """
    ttft = np.zeros(trace.requests)
    first_tokens = np.zeros(trace.passes, np.bool_)
    for request, (begin, end) in enumerate(pairwise(trace.first_passes.tolist())):
        decodes = np.flatnonzero(~trace.pass_prefill[begin:end])
        prompt = max(1, int(decodes[0])) if decodes.size else end - begin
        ttft[request] = passes[begin : begin + prompt].sum()
        first_tokens[begin : begin + prompt] = True
    return ttft, passes[~first_tokens & ~trace.pass_prefill]


def _decide(
    stream: Stream,
    offsets: Ints,
    capacity: int,
    policy: Policy,
    scope: Scope = "shared",
    pin: str = "step",
    **how: Any,
) -> tuple[NDArray[np.bool_], Ints | None]:
    """Replay an expert cache to find which requests miss, [N].

    Also returns their slots [N] where a step may use a slot twice.
    """
    sizes = np.diff(stream.starts)
    least = min(split_capacity(capacity, len(offsets) - 1, scope, np.diff(offsets).tolist()))
    if pin != "step" or sizes.max(initial=0) > least:
        return replay_steps(stream, offsets, capacity, policy, scope, pin, **how)
    result = replay(stream, offsets, capacity, policy, scope=scope, pin=pin, detail=True, **how)
    assert result.missed is not None
    return result.missed, None


def replay_steps(
    stream: Stream,
    offsets: Ints,
    capacity: int,
    policy: Policy,
    scope: Scope = "shared",
    pin: str = "step",
    seed: int = 0,
    reset: bool = False,
) -> tuple[NDArray[np.bool_], Ints]:
    """Replay a stream of steps through a run's cache: (misses [N], slots [N]).

    It needs no compiled code that a run does not need too.
    """
    missed = np.empty(stream.pieces.size, np.bool_)
    slots = np.empty(stream.pieces.size, np.int64)
    pieces = Pieces.unsplit(offsets.tolist(), [1] * (len(offsets) - 1))
    cache, before = None, -1
    for s, request in enumerate(stream.request.tolist()):
        if cache is None or (reset and request != before):
            cache = Cache(pieces, capacity, policy, scope, seed, stream)
        before = request
        part = slice(int(stream.starts[s]), int(stream.starts[s + 1]))
        requested = stream.pieces[part].astype(np.int64)
        served = cache.serve(
            requested,
            int(stream.now[s]),
            pin,
            token=int(stream.token[s]),
            request=request,
            rows=stream.rows[part],
            weights=stream.weights[part],
        )
        if served.pinned:
            cache.release(requested)
        missed[part], slots[part] = served.hits == 0, served.slots
    return missed, slots


class StepTimer:
    """Simulator of the time of single steps: a scheduler and its clock.

    It replaces the scheduler's cache, and returns the decisions that were made beforehand.
    """

    served: ServedStep

    def __init__(self, offsets: Ints, expert_bytes: int, chunk_bytes: int, costs: Costs) -> None:
        layers, experts = len(offsets) - 1, int(offsets[-1])
        self.costs, self.expert_bytes = costs, expert_bytes
        self.chunks = max(1, -(-expert_bytes // chunk_bytes))
        pieces = Pieces.unsplit(offsets.tolist(), [expert_bytes] * layers, [self.chunks] * experts)
        scheduler = Scheduler(pieces, layers, policy_of("lru"), lanes=costs.lanes)
        self.capacity = layers
        scheduler.placement.cache = self  # type: ignore[assignment]
        self._clock = Clock(scheduler, costs)

    def step(self, step: TraceStep, missed: NDArray[np.bool_], slots: Ints) -> Floats:
        """Simulate one step: (seconds, stall, computation).

        Slot -1 is a slot of no other request.
        """
        fresh = np.arange(step.experts.size, dtype=np.int64) + (1 << 40)
        slot_numbers = np.unique(np.where(slots < 0, fresh, slots), return_inverse=True)[1]
        hits = (~missed).astype(np.int64)
        self._clock.scheduler.placement.tier_slots = np.arange(step.experts.size)
        self.served = ServedStep(
            slot_numbers, hits, np.full_like(slot_numbers, -1), False, int((hits == 0).sum())
        )
        clock = self._clock
        before = clock.now, clock.stall, clock.compute
        clock.run(step)
        after = clock.now, clock.stall, clock.compute
        return np.subtract(after, before)

    def serve(self, *_: object, **__: object) -> ServedStep:
        return self.served


def _step_seconds(
    trace: Trace, stream: Stream, missed: NDArray[np.bool_], slots: Ints | None, each: StepTimer
) -> Floats:
    """Simulate each step of a trace: seconds, stall and computation, [S, 3]."""
    tokens = np.diff(trace.pass_starts)[stream.token]
    results = step_times(
        stream.starts, missed, stream.rows, tokens, each.costs, each.expert_bytes, each.chunks
    )
    if slots is None:
        return results
    for s in range(stream.layer.size):
        part = slice(int(stream.starts[s]), int(stream.starts[s + 1]))
        assigned = slots[part][slots[part] >= 0]
        if np.unique(assigned).size < assigned.size:
            step = TraceStep(
                0,
                int(stream.layer[s]),
                stream.pieces[part].astype(np.int64),
                stream.rows[part].astype(np.int64) if stream.rows.size else None,
                int(tokens[s]),
            )
            results[s] = each.step(step, missed[part], slots[part])
    return results
