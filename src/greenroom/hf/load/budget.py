"""Stage 3 of loading: compute how many experts fit into memory, before weights are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import LoadConfig, show_bytes
from greenroom.core.cache.scope import least_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.home_devices import spread
from greenroom.core.transfers.queue import count_staging_slots
from greenroom.core.transfers.tiers import least_host_slots
from greenroom.errors import UsageError
from greenroom.hf.load.describe import Description
from greenroom.hf.load.placement import placement_of
from greenroom.hf.memory.budget import DeviceBudget, budget_bytes, host_slots
from greenroom.hf.memory.devices import COMPILED, engines_for, lanes_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.memory.slots import pieces_of, slots_for
from greenroom.policies import choose
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.memory.system import available_bytes, rss_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """Number of expert slots that a run's memory options allow, and its origin.

    setup:              the model's setup, with the cache of experts in host memory if there is one
    full_context_slots: slots for experts when the KV cache is full
    initial_slots:      slots for experts at the start and with short contexts
    slot_budget:        division of `--memory` between experts and KV cache; None with `--cache`,
                        which sets the number of slots itself
    caller_bytes:       bytes of `--memory` that the calling program uses for itself
    host_bytes:         those of `--host-memory`, with GPUs
    engines:            the GPUs, empty on a CPU; the first GPU has the non-expert weights
    gpu:                the memory of each GPU; None on a CPU
    min_slots:          fewest slots for experts, while other processes need memory
    pressure:           whether slots are given back then
    """

    setup: ModelSetup
    full_context_slots: int
    initial_slots: int
    slot_budget: SlotBudget | None
    caller_bytes: int
    host_bytes: int
    engines: Sequence[Engine]
    gpu: DeviceBudget | None
    min_slots: int
    pressure: bool


def budget_for(
    description: Description,
    setup: ModelSetup,
    config: LoadConfig,
    host_bytes: int,
    activation_bytes: int,
) -> Budget:
    """Compute how many experts fit into the memory that a run's options allow.

    host_bytes:       bytes of main memory that the calling program uses for itself
    activation_bytes: bytes that it uses where the model computes

    Raises BudgetError, which names a sufficient budget, if too few experts fit.
    """
    engines = engines_for(setup)
    caller_bytes = activation_bytes
    if not engines:
        caller_bytes, host_bytes = caller_bytes + host_bytes, 0
    gpu = None
    if engines:
        memory = None if config.cache is not None else config.memory
        active = engines[: setup.active_devices]
        gpu = DeviceBudget(memory, lambda: min(each.memory() for each in active))
    placement = placement_of(description, setup, config, gpu, engines[0] if engines else None)
    if placement != setup.placement:
        setup = replace(setup, placement=placement)
        setup = replace(setup, capacity=least_slots(setup))
    if engines or config.host_memory is not None:
        setup = with_host_tier(setup, config, host_bytes)
    catalog = description.skeleton.catalog
    tasks = setup.pins.tasks.values() if setup.pins is not None else ()
    pinned = max((task.experts.size for task in tasks), default=0)
    least = max(setup.capacity, min(pinned + description.top_k, catalog.experts))
    pressure = _gives_back(config, gpu is not None)
    others = caller_bytes, host_bytes, engines, gpu, least, pressure
    if config.cache is not None:
        slots = slots_for(config.cache, catalog)
        group_sizes(pieces_of(setup), slots, setup.scope)  # or BudgetError
        setup = replace(setup, capacity=slots)
        return Budget(setup, slots, slots, None, *others)
    nbytes = gpu.nbytes if gpu else budget_bytes(config.memory)
    options: dict[str, Any] = {}
    if gpu:
        options = {
            "label": gpu.LABEL,
            "devices": pieces_of(setup).equal_devices,
            "release": engines[0].release,
        }
    slot_budget = description.slot_budget(
        config.readers, setup.kernels in COMPILED, nbytes, least, caller_bytes, **options
    )
    setup = replace(setup, budget_bytes=nbytes)
    if gpu is None:
        _compare_with_machine(slot_budget.initial_bytes())
    most, initial = slot_budget.full_context_slots, slot_budget.initial_slots()
    return Budget(setup, most, initial, slot_budget, *others)


def _gives_back(config: LoadConfig, on_a_gpu: bool) -> bool:
    """Return whether the run gives slots back while other processes need memory."""
    if on_a_gpu and config.pressure == "on":
        raise UsageError(
            "--pressure on gives main memory back, but the slots are in the GPU's memory: leave it"
            " out, or use --device cpu"
        )
    by_default = config.pressure == "auto" and config.cache is None
    return not on_a_gpu and (config.pressure == "on" or by_default)


def _compare_with_machine(nbytes: int) -> None:
    """Warn if a CPU run takes more bytes than the machine has for it now."""
    free = available_bytes() + rss_bytes()
    if nbytes > free:
        log.warning(
            "--memory lets this run take %s, but this machine has %s for it now: it may become slow"
            " or be ended by the system; give less, or --memory auto",
            show_bytes(nbytes),
            show_bytes(free),
        )


def with_host_tier(setup: ModelSetup, config: LoadConfig, caller_bytes: int = 0) -> ModelSetup:
    """Add a cache of experts in host memory to a setup.

    Its size follows from `--host-memory`, of which the calling program uses `caller_bytes`. Raises
    BudgetError if `--host-memory` is too small for the process and its transfer buffers.
    """
    lanes = spread(lanes_of(setup), len(setup.devices))
    staging_slots = count_staging_slots(lanes)
    offloaded = setup.keys_values.host_bytes(setup.context)
    stride = setup.catalog.slot_bytes if setup.config.uses_host() else None
    pieces = pieces_of(setup) if setup.split is not None or setup.copies is not None else None
    budget, slots = host_slots(
        config.host_memory, setup.catalog, staging_slots, offloaded, stride, pieces, caller_bytes
    )
    if pieces is not None and slots >= least_host_slots(pieces) and pieces.copies is not None:
        # Experts of host memory are whole: a copy on the GPU saves no read from disk.
        setup = replace(setup, copies=replace(pieces.copies, remainder=()))
    policy = choose(config.policy, slots, setup.catalog.experts).name
    return replace(setup, host_bytes=budget, host_capacity=slots, host_policy=policy)


def least_slots(setup: ModelSetup) -> int:
    """Return the fewest expert slots with which a token can be computed."""
    return least_capacity(pieces_of(setup), setup.scope)
