"""Leases of host slots, substitute experts and low-precision copies for a step.

A step is one layer of one forward pass; its plan decides which leases it needs. What is leased is
not evicted while the step needs it.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.cache import NO_FLAGS, Flags
from greenroom.core.cache.placement import Placement
from greenroom.core.events import HOST, Routed
from greenroom.core.plan import StepPlan
from greenroom.core.scheduler.step import Step
from greenroom.core.transfers.transfers import Transfers


def lease(
    step: Step, event: Routed, plan: StepPlan, placement: Placement, transfers: Transfers
) -> tuple[Flags, StepPlan | None]:
    """Reserve the host slots and substitute experts that a layer's step needs by its plan.

    Returns flags of the exact experts that get no slot on a device, and the plan of the
    approximated experts (None if there are none). An expert that the plan leaves to the host, but
    that gets no host slot, is computed on its device.
    """
    plan, exact = plan.ordered(event.experts)
    step.choose(event, plan.request[:exact])
    approximated = None
    if exact < plan.request.size:
        approximated = StepPlan(
            plan.request[exact:], plan.weights[exact:], plan.form[exact:], plan.place[exact:]
        )
        experts = event.experts[approximated.request].tolist()
        for expert, weight in zip(experts, approximated.weights.tolist(), strict=True):
            if expert in placement.buffer.borrowed:  # no request wants its prefetch
                transfers.drop_prefetch(expert)
            if weight != expert:
                step.substitutes.add(weight)
        for weight in step.substitutes:  # not a victim of this step
            placement.cache.state.pinned[weight] += 1
    without_slot, host = NO_FLAGS, transfers.host
    on_host = np.flatnonzero(plan.place[:exact] == HOST).tolist()
    if on_host and host is not None:
        for request in on_host:
            slot, resident = host.request(int(step.array[request]))
            if slot >= 0:
                step.on_host[request] = slot, resident
        if step.on_host:
            without_slot = np.zeros(exact, np.bool_)
            without_slot[list(step.on_host)] = True
    return without_slot, approximated
