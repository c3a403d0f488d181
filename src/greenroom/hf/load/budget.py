"""Stage 3 of loading: compute the number of expert slots, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import LoadConfig
from greenroom.core.cache.scope import least_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.home_devices import spread
from greenroom.core.transfers.queue import count_staging_slots
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import DeviceBudget, budget_bytes, host_slots
from greenroom.hf.memory.devices import engines_for, lanes_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.memory.slots import pieces_of, slots_for
from greenroom.policies import choose
from greenroom.runtime.cuda.engine import Engine


@dataclass(frozen=True, slots=True)
class Budget:
    """Expert slots that a run's memory options leave, and the memory that they count.

    setup:        the setup that the options ask for, with the host tier
    slot_budget:  of `--memory`; None where `--cache` is the number of slots
    caller_bytes: bytes of the process that are the caller's
    engines:      the GPUs; the first one has the dense parts
    gpu:          the memory of each GPU
    """

    setup: ModelSetup
    full_context_slots: int
    initial_slots: int
    slot_budget: SlotBudget | None
    caller_bytes: int
    engines: Sequence[Engine]
    gpu: DeviceBudget | None


def budget_for(
    description: Description, setup: ModelSetup, config: LoadConfig, caller_bytes: int
) -> Budget:
    """Compute the number of expert slots that the memory options leave.

    `caller_bytes` of the process are left to the caller. BudgetError, which names a sufficient
    budget, where not even the fewest slots have room.
    """
    engines = engines_for(setup)
    gpu = None
    if engines:
        memory = None if config.cache is not None else config.memory
        gpu = DeviceBudget(memory, lambda: min(each.memory() for each in engines))
    if engines or config.host_memory is not None:
        setup = with_host_tier(setup, config)
    catalog = description.skeleton.catalog
    if config.cache is not None:
        slots = slots_for(config.cache, catalog)
        group_sizes(pieces_of(setup), slots, setup.scope)  # or BudgetError
        return Budget(
            replace(setup, capacity=slots), slots, slots, None, caller_bytes, engines, gpu
        )
    nbytes = gpu.nbytes if gpu else budget_bytes(config.memory)
    tasks = setup.pins.tasks.values() if setup.pins is not None else ()
    pinned = max((task.experts.size for task in tasks), default=0)
    least = max(setup.capacity, min(pinned + description.top_k, catalog.experts))
    options: dict[str, Any] = {}
    if gpu:
        options = {"label": gpu.LABEL, "devices": len(engines), "release": engines[0].release}
    slot_budget = description.slot_budget(config.readers, nbytes, least, caller_bytes, **options)
    setup = replace(setup, budget_bytes=nbytes)
    return Budget(
        setup,
        slot_budget.full_context_slots,
        slot_budget.initial_slots(),
        slot_budget,
        caller_bytes,
        engines,
        gpu,
    )


def with_host_tier(setup: ModelSetup, config: LoadConfig) -> ModelSetup:
    """Set up the cache of experts in host memory, within `--host-memory`.

    BudgetError where that is too small.
    """
    lanes = spread(lanes_of(setup), len(setup.devices))
    staging_slots = count_staging_slots(lanes)
    offloaded = setup.keys_values.host_bytes(setup.context)
    stride = setup.catalog.slot_bytes if setup.config.uses_host() else None
    budget, slots = host_slots(config.host_memory, setup.catalog, staging_slots, offloaded, stride)
    policy = choose(config.policy, slots, setup.catalog.experts).name
    return replace(setup, host_bytes=budget, host_capacity=slots, host_policy=policy)


def least_slots(setup: ModelSetup) -> int:
    """Return the fewest expert slots with which a step of one token can run."""
    return least_capacity(pieces_of(setup), setup.scope)
