"""Construction of a scheduler with the options of a configuration."""

from __future__ import annotations

from typing import Any

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy
from greenroom.core.prefetch.by_rank import lookahead_of
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UsageError


def build_scheduler(
    pieces: Pieces,
    capacity: int,
    policy: Policy,
    config: SchedulerConfig,
    *,
    costs: Costs | None = None,
    expert_bytes: int = 0,
    top_k: int = 0,
    **settings: Any,
) -> Scheduler:
    """Build a scheduler with the options of a configuration.

    capacity:     the number of cache slots, counted in unsplit experts
    costs:        durations of transfers and computations; None if the host's processor computes
                  nothing
    expert_bytes: the size of the experts that `costs` describes
    settings:     further arguments of `Scheduler`

    UsageError if an option computes on the host's processor, but there is no expert cache in host
    memory.
    """
    options = config.options(pieces, costs, expert_bytes)
    if any(each.uses_host for each in options) and settings.get("host") is None:
        raise UsageError(
            "--co-compute auto needs a cache of experts in host memory: give --host-memory"
            " (simulate: --host-capacity) above 0"
        )
    lookahead = lookahead_of(pieces, config.prefetch_rule, top_k)
    return Scheduler(pieces, capacity, policy, options=options, lookahead=lookahead, **settings)
