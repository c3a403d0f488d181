"""Simulated times of all steps of a trace, computed in one compiled call without events.

Without prefetching, and with a slot for every expert of a step, all transfers end within their
step. Then the times follow a recurrence: chunks arrive in the order in which they start, each lane
(a link with n lanes carries n chunks at a time) takes the next chunk when its last has
arrived, and the processor computes experts as they arrive. A step that uses a slot twice needs
events (`timed.StepTimer`). Tests check that both give the same times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.cost import COOLED, Costs, Work
from greenroom.core.pieces import Ints
from greenroom.core.transfers.queue import count_staging_slots

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def step_times(
    starts: Ints,
    missed: Bools,
    rows: NDArray[np.int32],
    tokens: Ints,
    costs: Costs,
    expert_bytes: int,
    chunks: int,
) -> Floats:
    """Compute the simulated time of each step of a trace, without prefetching.

    starts:       step s has the requests from starts[s] to starts[s + 1] - 1
    missed:       whether each request is a cache miss
    rows:         number of tokens that use the expert of each request; empty: 1 each
    tokens:       number of tokens of each step
    expert_bytes: bytes of an expert, which is moved in `chunks` chunks

    Returns for each step the seconds in all, of waiting, and of computation, [steps, 3].
    """
    times: Floats = _step_times(
        starts,
        missed,
        rows,
        _seconds(costs.dense, int(tokens.max(initial=1)))[tokens],
        _seconds(costs.expert, int(rows.max(initial=1))),
        np.array([link.bandwidth for link in costs.links]),
        np.array([link.latency for link in costs.links]),
        np.array(costs.lanes),
        count_staging_slots(costs.lanes),
        costs.handling,
        costs.miss,
        costs.wake,
        expert_bytes,
        chunks,
    )
    return times


def _seconds(work: Work, most: int) -> Floats:
    """Return the seconds that computing 0, 1, ..., `most` tokens takes."""
    return np.array([work.seconds(tokens) for tokens in range(most + 1)])


@jit
def _step_times(
    starts: Ints,
    missed: Bools,
    rows: NDArray[np.int32],
    dense: Floats,
    expert: Floats,
    bandwidth: Floats,
    latency: Floats,
    lanes: Ints,
    staging_slots: int,
    handling: float,
    miss: float,
    wake: float,
    expert_bytes: int,
    chunks: int,
) -> Floats:
    out = np.zeros((dense.size, 3))
    free = np.zeros(bandwidth.size)  # when each link has carried all its chunks
    landed = np.zeros((lanes.size, lanes.max()))  # when each lane's last chunk landed, round-robin
    turn = np.zeros(lanes.size, np.int64)
    staged = np.zeros(staging_slots)  # when each staging slot's last chunk left it, round-robin
    size = expert_bytes // chunks
    for s in range(dense.size):
        free[:] = 0.0
        landed[:], staged[:], turn[:] = 0.0, 0.0, 0
        staging_slot, stall, slowed, now = 0, 0.0, 0.0, 0.0
        for i in range(starts[s], starts[s + 1]):  # the first group: resident experts
            if not missed[i]:
                now += expert[rows[i] if rows.size else 1]
        compute, more = now, miss + handling
        for i in range(starts[s], starts[s + 1]):
            if not missed[i]:
                continue
            ready = 0.0
            for chunk in range(chunks):
                nbytes = size + (expert_bytes % chunks if chunk == chunks - 1 else 0)
                ready = staged[staging_slot] if lanes.size > 1 else 0.0
                for k in range(bandwidth.size):
                    free[k] = max(ready, landed[k, turn[k]], free[k]) + nbytes / bandwidth[k]
                    landed[k, turn[k]] = ready = free[k] + latency[k]
                    turn[k] = (turn[k] + 1) % lanes[k]
                staged[staging_slot] = ready
                staging_slot = (staging_slot + 1) % staging_slots
            wait = max(0.0, ready - now)
            stall += wait
            now += wait
            seconds = expert[rows[i] if rows.size else 1] + more
            more = handling
            slowed += wake * min(wait, COOLED)
            now += seconds
            compute += seconds
        out[s] = dense[s] + now + slowed, stall, dense[s] + compute + slowed
    return out
