"""Quick plan for a run without a stored setting: the default eviction policy, or LRU.

It takes about a second. It compares the misses of both policies on the routing of earlier runs of
the model, or on a synthetic workload if too few tokens are recorded. Whether prefetching pays is
measured during the run (core/prefetch/guard.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from greenroom.plan.settings import DEFAULT, PLAIN, Setting
from greenroom.policies import choose
from greenroom.sim.timed import replay_steps
from greenroom.trace import Trace, stream

STEPS = 12_000  # the latest ones, at tens of microseconds each


@dataclass(frozen=True, slots=True)
class QuickPlan:
    """Quick plan for a run: the chosen setting, and its expected misses.

    `misses` are those of the setting for each token, `lru_misses` those of plain LRU.
    """

    setting: Setting
    misses: float
    lru_misses: float


def quick_plan(trace: Trace, capacity: int) -> QuickPlan:
    """Choose between the default eviction policy and LRU, by misses on a trace.

    `capacity` is the number of cache slots. Only the last requests of the trace are replayed.
    """
    latest = _latest_requests(trace, max(1, STEPS // trace.layers))
    steps = stream(latest, "runtime")
    experts, tokens = int(latest.offsets[-1]), latest.tokens
    counted = {
        name: int(
            np.count_nonzero(
                replay_steps(steps, latest.offsets, capacity, choose(name, capacity, experts))[0]
            )
        )
        / tokens
        for name in (PLAIN.policy, DEFAULT.policy)
    }
    ours, plain = counted[DEFAULT.policy], counted[PLAIN.policy]
    if ours < plain:
        return QuickPlan(DEFAULT, ours, plain)
    return QuickPlan(replace(DEFAULT, policy=PLAIN.policy), plain, plain)


def _latest_requests(trace: Trace, passes: int) -> Trace:
    """Select a trace's last requests, which have about `passes` forward passes in all."""
    begin = int(np.searchsorted(trace.first_passes[:-1], trace.passes - passes, "right")) - 1
    return trace.select(range(max(0, begin), trace.requests))
