"""Simulated times of all steps of a trace, computed in one compiled call without events.

With demand transfers only, and a slot for every expert of a step, no transfer outlives its step.
Then chunks land in the order in which they start, a lane takes the next chunk when its last has
landed (on each link of a chain), and the processor computes experts in the order in which they
arrive: a recurrence. Steps that use a slot twice need the event machine (`timed.StepTimer`); tests
hold the two to the same times.
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
    """Compute the simulated seconds, stall and computation of each step, [S, 3].

    Arrays are as in `Stream`, and `tokens` [S]. An expert has `chunks` chunks, equal but for the
    last.
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
        costs.wake,
        expert_bytes,
        chunks,
    )
    return times


def _seconds(work: Work, most: int) -> Floats:
    """Tabulate the seconds that computing 0, 1, ... tokens takes."""
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
        compute = now
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
            seconds = expert[rows[i] if rows.size else 1] + handling
            slowed += wake * min(wait, COOLED)
            now += seconds
            compute += seconds
        out[s] = dense[s] + now + slowed, stall, dense[s] + compute + slowed
    return out
