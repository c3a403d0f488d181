"""Demands of a step (one layer of one forward pass) for its missing experts."""

from __future__ import annotations

from greenroom.core.scheduler.step import Step


def demand(step: Step, misses: list[int]) -> None:
    """Request the misses, except where an earlier request still needs the slot."""
    holder: dict[int, int] = {}
    missed = set(misses)
    for request, slot in enumerate(step.slots.tolist()):
        if request in step.on_host:
            continue
        if request in missed:
            if slot in holder:
                step.missing[step.experts[request]] = request
                step.blocked[holder[slot]] = request
            else:
                step.demand(request, slot)
        holder[slot] = request
