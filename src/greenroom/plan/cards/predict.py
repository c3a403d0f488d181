"""Predicted speed of a model on a graphics card, from data sheets.

The estimator is that of every plan; the costs are those of a predicted machine (`machine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from greenroom.core.config.scheduler import option_names
from greenroom.core.cost import Costs, Link
from greenroom.plan.estimate import Estimate, Estimator
from greenroom.plan.model import Model
from greenroom.plan.settings import AUTO, DEFAULT, OFF
from greenroom.plan.workload import Workload

REACTIVE = replace(DEFAULT, prefetch=OFF)  # as in the table of `greenroom doctor`
FREE_LINK = Link(float("inf"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed of a model on a graphics card whose caches are full.

    capacity: experts that the card's memory holds
    host:     experts that main memory holds
    fits:     whether the card's memory holds all experts
    moved:    estimate in which misses are moved to the card
    shared:   estimate in which the host's processor computes some misses (`--co-compute auto`);
              None if there are no misses, or too few experts in main memory
    """

    capacity: int
    host: int
    fits: bool
    moved: Estimate
    shared: Estimate | None


def predict(
    model: Model,
    costs: Costs,
    workload: Workload,
    memory: int,
    host_memory: int,
    bracket: bool = True,
) -> Prediction:
    """Predict a model's speed within budgets of card memory and main memory, in bytes.

    costs:   those of the card, with links from disk to host and from host to card
    bracket: whether ranges cover all traces of the workload

    An expert that memory has room for is assumed to be there. BudgetError if the model does not fit
    in `memory`.
    """
    capacity = model.slots(memory)
    host = min(model.experts, host_memory // model.slot_bytes)
    moving, tier, fits = costs, host, capacity >= model.experts
    if fits:
        moving, tier = replace(costs, links=(FREE_LINK,), handling=0.0, host=None), 0
    elif host >= model.experts:
        costs = replace(costs, links=(FREE_LINK, *costs.links[1:]))
        moving, tier = replace(costs, links=costs.links[1:], host=None), 0
    moved = Estimator(model, moving, workload, host=tier, warm=True)
    shared = None
    if "co_compute" in option_names() and not fits and host >= model.least_slots:
        both = Estimator(model, costs, workload, host=host, warm=True)
        shared = both.of(replace(REACTIVE, co_compute=AUTO), capacity, bracket)
    return Prediction(capacity, host, fits, moved.of(REACTIVE, capacity, bracket), shared)
