"""Simulated times of a trace on a machine: TTFT, TPOT and stalls of every prompt.

A compiled replay first finds out which expert requests are misses. Then one compiled call computes
the times of all steps (`steps.py`). Steps that use a slot twice are simulated by events instead.
`event_driven.py` simulates all steps by events; it gives the same times, a thousand times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.cache import Cache, ServedStep
from greenroom.core.cache.learned import export_learned
from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.cost import CHUNK_BYTES, Costs
from greenroom.core.pieces import Ints, Pieces
from greenroom.core.policy import Arrays, Policy
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
    """Simulated times of a run that answers a trace's prompts one after another, in seconds.

    requests:    number of expert requests, each an access to one expert in the cache
    misses:      number of cache misses
    ttft:        time to first token of each answer: the time of its prompt's passes (of its first
                 pass, if the trace has no prompts)
    gaps:        time of each later decoding pass, which is the time between two tokens
    seconds:     time in all
    stall:       time in which the processor waited for experts
    compute:     time in which the processor computed
    bytes_moved: bytes that were read from the store
    """

    requests: int
    misses: int
    ttft: Floats
    gaps: Floats
    seconds: float
    stall: float
    compute: float
    bytes_moved: int

    def as_json(self) -> dict[str, float | int | None]:
        """Return simulated times as JSON fields, with the names that `greenroom run` uses.

        `ttft_s` (time to first token) and `tpot_s` (time per output token) are medians.
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
    """Simulate the times of a trace on a machine, without prefetching.

    stream:       the trace's expert requests, one step per forward pass and layer
    capacity:     size of the cache in experts
    costs:        speeds of the machine
    expert_bytes: bytes of an expert, which is moved in chunks of at most `chunk_bytes`
    how:          options `scope`, `pin`, `seed` and `reset` of `greenroom.sim.replay.replay`

    Raises UsageError for an impossible capacity, scope or pin.
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
    """Split the times of all forward passes into times to first token and decoding times.

    Returns (time to first token of each answer, time of each later decoding pass). The time of a
    pass that gave its text several tokens is divided among them.
    """
    ttft = np.zeros(trace.requests)
    first_tokens = np.zeros(trace.passes, np.bool_)
    for request, (begin, end) in enumerate(pairwise(trace.first_passes.tolist())):
        decodes = np.flatnonzero(~trace.pass_prefill[begin:end])
        prompt = max(1, int(decodes[0])) if decodes.size else end - begin
        ttft[request] = passes[begin : begin + prompt].sum()
        first_tokens[begin : begin + prompt] = True
    later = ~first_tokens & ~trace.pass_prefill
    if trace.new_tokens is None:
        return ttft, passes[later]
    new = trace.new_tokens[later]
    return ttft, np.repeat(passes[later] / new, new)


def _decide(
    stream: Stream,
    offsets: Ints,
    capacity: int,
    policy: Policy,
    scope: Scope = "shared",
    pin: str = "step",
    **how: Any,
) -> tuple[NDArray[np.bool_], Ints | None]:
    """Replay an expert cache; return which requests are misses, and their slots.

    Slots are None if no step can use a slot twice: then they do not affect the times.
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
    pieces: Pieces | None = None,
) -> tuple[NDArray[np.bool_], Ints]:
    """Replay expert requests through the cache of a real run, step by step.

    Returns for each request whether it was a miss, and its slot. Unlike `replay`, this function
    needs no compiled code of its own. Arguments are as in `greenroom.sim.replay.replay`; `pieces`
    are the experts on several devices.
    """
    missed = np.empty(stream.pieces.size, np.bool_)
    slots = np.empty(stream.pieces.size, np.int64)
    pieces = pieces or Pieces.unsplit(offsets.tolist(), [1] * (len(offsets) - 1))
    cache, before = None, -1
    for s, request in enumerate(stream.request.tolist()):
        if cache is None or (reset and request != before):
            cache = Cache(pieces, capacity, policy, scope, seed, stream)
        before = request
        part = slice(int(stream.starts[s]), int(stream.starts[s + 1]))
        served = _serve_step(cache, stream, s, pin)
        missed[part], slots[part] = served.hits == 0, served.slots
    return missed, slots


def _serve_step(cache: Cache, stream: Stream, step: int, pin: str) -> ServedStep:
    """Serve a stream's step from an expert cache, and unpin its experts."""
    part = slice(int(stream.starts[step]), int(stream.starts[step + 1]))
    requested = stream.pieces[part].astype(np.int64)
    served = cache.serve(
        requested,
        int(stream.now[step]),
        pin,
        token=int(stream.token[step]),
        request=int(stream.request[step]),
        prefill=bool(stream.prefill[step]),
        rows=stream.rows[part],
        weights=stream.weights[part],
    )
    if served.pinned:
        cache.release(requested)
    return served


def learned_by_policy(
    stream: Stream, pieces: Pieces, capacity: int, policy: Policy, scope: Scope, seed: int
) -> Arrays:
    """Return what an eviction policy has learned after serving requests; empty if it never learns.

    stream: the requests, in order `runtime`; nothing is prefetched
    """
    if policy.learning is None:
        return {}
    cache = Cache(pieces, capacity, policy, scope, seed)
    for step in range(stream.layer.size):
        _serve_step(cache, stream, step, "step")
    return export_learned(cache)


class StepTimer:
    """Event simulator of single steps whose cache hits and slots are already decided.

    The object takes the place of the scheduler's cache, and answers with the given decisions.
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
        """Simulate one step; return its seconds in all, of waiting, and of computation.

        `missed` and `slots` are the decisions for the step's experts. Slot -1 stands for a slot
        that no other expert of the step uses.
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
    """Return each step's seconds in all, of waiting, and of computation, [steps, 3]."""
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
