"""Predicted speed of a model on a graphics card, from data sheets.

The estimator is that of every plan; the costs are those of a predicted machine (`machine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from greenroom.core.config.scheduler import option_names
from greenroom.core.cost import Costs, Link
from greenroom.core.home_devices import SPREAD, DevicePlacement
from greenroom.core.pieces import Pieces
from greenroom.plan.estimate import Estimate, Estimator
from greenroom.plan.model import Model
from greenroom.plan.settings import AUTO, DEFAULT, OFF
from greenroom.plan.workload import Workload
from greenroom.sim.device_placement import place_experts, slots_of

REACTIVE = replace(DEFAULT, prefetch=OFF)  # as in the table of `greenroom doctor`
FREE_LINK = Link(float("inf"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed of a model on one or several graphics cards whose caches are full.

    capacity: experts that the cards' memory holds
    host:     experts that main memory holds
    fits:     whether the cards' memory holds all experts
    graph:    whether the passes of single tokens are one CUDA graph
    pieces:   whether they are one for each layer
    placement: of experts on several cards
    moved:    estimate in which misses are moved to the card
    shared:   estimate in which the host's processor computes some misses (`--co-compute auto`);
              None if there are no misses, or too few experts in main memory
    """

    capacity: int
    host: int
    fits: bool
    graph: bool
    pieces: bool
    placement: DevicePlacement
    moved: Estimate
    shared: Estimate | None


def predict(
    model: Model,
    costs: Costs,
    workload: Workload,
    memory: int,
    host_memory: int,
    bracket: bool = True,
    cards: int = 1,
) -> Prediction:
    """Predict a model's speed within budgets of card memory and main memory, in bytes.

    costs:   those of a card, with links from disk to host and from host to card
    memory:  of each card
    bracket: whether ranges cover all traces of the workload
    cards:   number of equal cards, of which the first one has all weights but experts

    An expert that memory has room for is assumed to be there. BudgetError if the model does not fit
    in `memory`.
    """
    capacity, placement = _slots_on_cards(model, costs, workload, memory, cards)
    host = min(model.experts, host_memory // model.slot_bytes)
    moving, tier, fits = costs, host, capacity >= model.experts
    if fits:
        moving, tier = replace(costs, links=(FREE_LINK,), handling=0.0, miss=0.0, host=None), 0
    elif host >= model.experts:
        costs = replace(costs, links=(FREE_LINK, *costs.links[1:]))
        moving, tier = replace(costs, links=costs.links[1:], host=None), 0
    devices: dict[str, Any] = {"devices": cards, "placement": placement.name}
    moved = Estimator(model, moving, workload, host=tier, warm=True, **devices)
    shared = None
    if "co_compute" in option_names() and not fits and host >= model.least_slots:
        both = Estimator(model, costs, workload, host=host, warm=True, **devices)
        shared = both.of(replace(REACTIVE, co_compute=AUTO), capacity, bracket)
    estimate = moved.of(REACTIVE, capacity, bracket)
    graph = fits and cards == 1 and costs.resident is not None
    pieces = not fits and cards == 1 and costs.pieces is not None
    return Prediction(capacity, host, fits, graph, pieces, placement, estimate, shared)


def _slots_on_cards(
    model: Model, costs: Costs, workload: Workload, memory: int, cards: int
) -> tuple[int, DevicePlacement]:
    """Return how many experts equal cards hold, and their placement.

    Each card has as many slots as the first one, as in a run.
    """
    slots = model.slots(memory)
    if cards == 1:
        return slots, SPREAD
    total = partial(slots_of, (memory - model.fixed_bytes) // model.slot_bytes)
    chosen = place_experts(AUTO, workload.traces[0], total, costs, model.expert_bytes, cards)
    layers, offsets = [1] * model.layers, model.offsets.tolist()
    return total(Pieces.unsplit(offsets, layers, devices=cards, placement=chosen.name)), chosen
