"""Choose the placement of experts on several GPUs, by their data sheets."""

from __future__ import annotations

from greenroom.config import LoadConfig
from greenroom.core.config.base import AUTO
from greenroom.core.home_devices import SPREAD, DevicePlacement
from greenroom.core.pieces import Pieces
from greenroom.errors import UnknownName, UsageError
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import DeviceBudget
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import slots_for
from greenroom.plan.cards.machine import card_costs
from greenroom.plan.cards.table import find_card
from greenroom.plan.workload import synthetic_trace
from greenroom.runtime.cuda.engine import Engine
from greenroom.sim.device_placement import place_experts


def placement_of(
    description: Description, setup: ModelSetup, config: LoadConfig, gpu: DeviceBudget | None,
    engine: Engine | None,
) -> DevicePlacement:  # fmt: skip
    """Return what `--device-placement` says, or for auto what takes less time for a token.

    engine: the first GPU, by whose data sheet the time is estimated; None without GPUs
    """
    named, devices = config.device_placement, len(setup.devices)
    if devices == 1 or named != AUTO:
        return SPREAD if named == AUTO else DevicePlacement(named)
    if gpu is None or engine is None:
        return DevicePlacement(unknown="no GPU computes")
    try:
        card = find_card(engine.name)
    except (UnknownName, UsageError):
        return DevicePlacement(unknown=f"{engine.name} is not among `greenroom list --gpus`")
    catalog = setup.catalog

    def slots(pieces: Pieces) -> int:
        if config.cache is not None:
            return slots_for(config.cache, catalog)
        budget = description.slot_budget(
            config.readers, False, gpu.nbytes, label=gpu.LABEL, devices=pieces.equal_devices
        )
        return budget.initial_slots()

    nbytes = catalog.all_experts_bytes // catalog.experts
    trace = synthetic_trace(catalog.experts_per_layer, description.top_k)
    return place_experts(named, trace, slots, card_costs(card, nbytes), nbytes, devices)
