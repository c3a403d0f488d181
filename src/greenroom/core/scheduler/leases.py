"""Carry out a step's plan: host slots, substitutes, and requests that are approximated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from greenroom.core.cache.cache import NOBODY, Flags
from greenroom.core.cache.placement import Placement
from greenroom.core.events import HOST, Routed
from greenroom.core.pieces import Ints
from greenroom.core.plan import Plan
from greenroom.core.policy import Rows
from greenroom.core.scheduler.step import Step
from greenroom.core.transfers.transfers import Transfers


class Approximations(NamedTuple):
    """Requests that are served with less than the exact expert, [m] each.

    experts: routed experts
    tokens:  of each, where they are known
    forms:   EXACT (with a substitute's weights), LOW or SKIP
    weights: the experts whose weights are used
    """

    experts: Ints
    tokens: Rows | None
    forms: list[int]
    weights: list[int]


def lease(
    step: Step, event: Routed, plan: Plan, placement: Placement, transfers: Transfers
) -> tuple[Flags, Approximations | None]:
    """Take the slots of host memory and the pins that a plan needs.

    Returns which exact requests get no slot on a device, and the requests that are approximated. A
    request for which host memory has no slot is computed on its device.
    """
    plan, exact = plan.ordered(event.experts)
    step.choose(event, plan.request[:exact])
    rest = None
    if exact < plan.request.size:
        rest = _approximations(event, plan, exact)
        for expert, weight in zip(rest.experts.tolist(), rest.weights, strict=True):
            if expert in placement.buffer.held:  # no request wants its prefetch
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


def _approximations(event: Routed, plan: Plan, exact: int) -> Approximations:
    requests = plan.request[exact:]
    return Approximations(
        event.experts[requests],
        None if event.rows is None else event.rows[requests],
        plan.form[exact:].tolist(),
        plan.weights[exact:].tolist(),
    )
