"""Carry out a step's plan: host slots, substitutes, and requests that are approximated."""

from __future__ import annotations

import numpy as np

from greenroom.core.cache.cache import NOBODY, Flags
from greenroom.core.cache.placement import Placement
from greenroom.core.events import HOST, Routed
from greenroom.core.plan import Plan
from greenroom.core.scheduler.step import Step
from greenroom.core.transfers.transfers import Transfers


def lease(
    step: Step, event: Routed, plan: Plan, placement: Placement, transfers: Transfers
) -> tuple[Flags, Plan | None]:
    """Take the slots of host memory and the pins that a plan needs.

    Returns which exact requests get no slot on a device, and the plan of those that are
    approximated. A request for which host memory has no slot is computed on its device.
    """
    plan, exact = plan.ordered(event.experts)
    step.choose(event, plan.request[:exact])
    rest = None
    if exact < plan.request.size:
        rest = Plan(
            plan.request[exact:], plan.weights[exact:], plan.form[exact:], plan.place[exact:]
        )
        experts = event.experts[rest.request].tolist()
        for expert, weight in zip(experts, rest.weights.tolist(), strict=True):
            if expert in placement.buffer.borrowed:  # no request wants its prefetch
                transfers.drop_prefetch(expert)
            if weight != expert:
                step.substitutes.add(weight)
        for weight in step.substitutes:  # not a victim of this step
            placement.cache.state.pinned[weight] += 1
    aside, host = NOBODY, transfers.host
    wanted = np.flatnonzero(plan.place[:exact] == HOST).tolist()
    if wanted and host is not None:
        for request in wanted:
            slot, resident = host.ask(int(step.array[request]))
            if slot >= 0:
                step.on_host[request] = slot, resident
        if step.on_host:
            aside = np.zeros(exact, np.bool_)
            aside[list(step.on_host)] = True
    return aside, rest
