"""What steps take, all of a trace in one compiled call: the event machine's sums, without events.

With demand transfers alone, and a slot of its own for every expert of a step, nothing of a step is
left when it ends. Then its chunks land in the order in which they start, a lane takes the next
chunk when its last has landed (on each link of a chain), and the processor takes experts in the
order in which they are there: a recurrence. Steps that use a slot twice need the event machine
itself (`timed.Chunked`); tests hold the two to the same times.
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
    """[S, 3]: seconds, stall and compute of each step; arrays as in `Stream`, `tokens` [S].

    An expert comes in `chunks` chunks, equal but for the last.
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
    """[most + 1] what so many tokens take."""
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
    free = np.zeros(bandwidth.size)  # when each link has carried what it was given
    landed = np.zeros((lanes.size, lanes.max()))  # when each lane's last chunk is there, in turn
    turn = np.zeros(lanes.size, np.int64)
    seated = np.zeros(staging_slots)  # when each seat's last chunk has left it, in turn
    size = expert_bytes // chunks
    for s in range(dense.size):
        free[:] = 0.0
        landed[:], seated[:], turn[:] = 0.0, 0.0, 0
        staging_slot, stall, slowed, now = 0, 0.0, 0.0, 0.0
        for i in range(starts[s], starts[s + 1]):  # the first group: what is there
            if not missed[i]:
                now += expert[rows[i] if rows.size else 1]
        compute = now
        for i in range(starts[s], starts[s + 1]):
            if not missed[i]:
                continue
            ready = 0.0
            for chunk in range(chunks):
                nbytes = size + (expert_bytes % chunks if chunk == chunks - 1 else 0)
                ready = seated[staging_slot] if lanes.size > 1 else 0.0
                for k in range(bandwidth.size):
                    free[k] = max(ready, landed[k, turn[k]], free[k]) + nbytes / bandwidth[k]
                    landed[k, turn[k]] = ready = free[k] + latency[k]
                    turn[k] = (turn[k] + 1) % lanes[k]
                seated[staging_slot] = ready
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
