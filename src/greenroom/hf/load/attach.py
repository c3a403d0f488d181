"""Stage 5 of loading: load the non-expert weights and attach the expert cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.core.cache.cache import compile_for
from greenroom.core.machine import machine_name
from greenroom.errors import BudgetError, OutputError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.load.budget import Budget, least_slots, with_host_tier
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import Workspace
from greenroom.hf.memory.devices import COMPILED
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.plan.history import files
from greenroom.policies import policy
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.measure.bandwidth import host_facts
from greenroom.runtime.memory.system import release_memory, rss_bytes

Progress = Callable[[float, str], None]

log = logging.getLogger(__name__)


def attach(
    description: Description,
    budget: Budget,
    setup: ModelSetup,
    config: LoadConfig,
    progress: Progress,
) -> PreTrainedModel:
    """Load the non-expert weights and attach an expert cache to the model.

    The policy is compiled and experts of earlier runs are read, so the model is ready for a prompt.
    `progress` is called with a share of the loading time (0 to 1) and the name of the next step.
    After an error the expert cache is detached: its threads end and its memory is freed.

    Raises DeviceError or BudgetError if memory does not suffice, CheckpointError if reading fails,
    CheckpointChanged if files have changed since their headers were read.
    """
    progress(0.1, "loading the dense parts")
    model: Any = description.skeleton.load(budget.engines[0].device if budget.engines else "cpu")
    generation = _replace_settings(model, setup)
    progress(0.5, "compiling the policy")
    compile_for(policy(setup.policy))
    if setup.host_bytes is not None:
        release_memory()
        setup = with_host_tier(setup, config, budget.host_bytes)  # measures the process again
    step = "making room for the experts"
    progress(0.7, step)
    model.greenroom = greenroom = Greenroom(
        model, setup, progress=lambda share: progress(0.7 + 0.2 * share, step)
    )
    greenroom.original_generation_config = generation
    try:
        greenroom.compile()
        release_memory()
        process = rss_bytes()
        if not budget.engines:
            greenroom.process_bytes = process - dense_bytes(model)
        if budget.slot_budget is not None:
            greenroom.use_slot_budget(_measured_budget(model, budget, budget.slot_budget, process))
        greenroom.pin()
        progress(0.9, "reading what earlier runs used most")
        greenroom.warm_up()
        assert setup.source is not None
        setup.source.stamps.check("while it was loaded")
        if budget.pressure:
            least = max(budget.min_slots, least_slots(setup))
            fewest = _fewest(greenroom, least, greenroom.capacity)
            greenroom.watch_pressure(fewest, fixed=config.pressure == "on")
    except BaseException:
        greenroom.detach()
        raise
    return model


def _fewest(greenroom: Greenroom, least: int, most: int) -> int:
    """Return the fewest slots for a token; every task's pinned experts leave slots for others."""
    pins, view = greenroom.setup.pins, greenroom.driver.scheduler.view
    for slots in range(least, most):
        with suppress(BudgetError):
            for pinned in [None, *(pins.sets if pins is not None else ())]:
                view.check_capacity(slots, pinned)
            return slots
    return most


def _replace_settings(model: Any, setup: ModelSetup) -> Any:
    """Set prefill block size and KV cache type in a generation config; return the original."""
    settings = model.generation_config
    before = deepcopy(settings)
    if not model.config.is_encoder_decoder:  # an encoder reads a prompt in one pass
        settings.prefill_chunk_size = setup.prompt_block
    for name, value in setup.keys_values.kind.generation_options.items():
        setattr(settings, name, value)
    return before


def _measured_budget(
    model: Any, budget: Budget, slot_budget: SlotBudget, process: int
) -> SlotBudget:
    """Return a copy of the slot budget that counts the memory of the process as measured now.

    The model, its expert cache and its kernels must already be in memory.
    """
    setup, need, catalog = model.greenroom.setup, slot_budget.need, slot_budget.catalog
    if budget.gpu is not None:
        need = budget.gpu.after(setup.capacity // slot_budget.devices * catalog.slot_bytes)
        need = replace(need, process=need.process + budget.caller_bytes)
    else:
        _store_process(setup, process - need.dense)
        need = replace(need, process=process + budget.caller_bytes, dense=0)
    workspace = Workspace.of(model, catalog, setup.kernels in COMPILED)
    least = max(slot_budget.min_slots, least_slots(setup))
    measured = replace(slot_budget, need=need, workspace=workspace, min_slots=least)
    fewest = _fewest(model.greenroom, least, measured.full_context_slots)
    return replace(measured, min_slots=fewest)


def _store_process(setup: ModelSetup, process: int) -> None:
    """Save the measured memory of Python and libraries, for plans and later runs of the model."""
    name, digest = machine_name(host_facts()), setup.fingerprint
    if not setup.remember:
        return
    try:
        files.update_records(digest, name, lambda records: records.with_load(process))
    except OutputError as error:
        log.warning("could not save the measured memory of this process for later runs: %s", error)
