"""Stage 5 of loading: load the dense parts, attach the cache, and give it what memory is left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.core.cache.cache import compile_for
from greenroom.core.machine import name_of
from greenroom.errors import OutputError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.attach.generation import replace_settings
from greenroom.hf.load.budget import Budget, SlotBudget, least_of, with_host
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import Workspace
from greenroom.hf.memory.growth import Growth
from greenroom.hf.memory.setup import ModelSetup
from greenroom.plan.history import files
from greenroom.policies import policy
from greenroom.runtime.kernels import precompile as ahead
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.measure.bandwidth import host
from greenroom.runtime.memory.system import give_back, rss_bytes, trim_heap

Progress = Callable[[float, str], None]

log = logging.getLogger(__name__)


def attach(
    description: Description,
    budget: Budget,
    setup: ModelSetup,
    config: LoadConfig,
    progress: Progress,
) -> PreTrainedModel:
    """The model with its cache of experts, ready for a first prompt; after an error, detached.

    DeviceError or BudgetError where memory does not suffice after all, CheckpointError where
    reading fails, CheckpointChanged where the files are no longer those of the headers.
    """
    progress(0.1, "loading the dense parts")
    model: Any = description.draft.load(budget.engines[0].device if budget.engines else "cpu")
    generation = replace_settings(model, description.keys_values.kind)
    progress(0.5, "compiling")
    compile_for(policy(setup.policy))
    ahead.wait()
    if setup.host_bytes is not None:
        give_back()
        setup = with_host(setup, config)  # the process is what it is now
    progress(0.7, "making room for the experts")
    model.greenroom = greenroom = Greenroom(model, setup)
    greenroom.generation = generation
    try:
        greenroom.compile()
        give_back()
        process = rss_bytes()
        if not budget.engines:
            greenroom.process_bytes = process - dense_bytes(model)
        if budget.slots is not None:
            greenroom.grow(_growth(model, description, budget, budget.slots, process))
        greenroom.pin()
        progress(0.9, "reading what earlier runs used most")
        greenroom.warm_up()
        assert setup.source is not None
        setup.source.stamps.check("while it was loaded")
    except BaseException:
        greenroom.detach()
        raise
    return model


def _growth(
    model: Any, description: Description, budget: Budget, slots: SlotBudget, process: int
) -> Growth:
    """All that is there for good is there now: what is left of the budget becomes slots."""
    setup, catalog, need = model.greenroom.parts, description.draft.catalog, slots.need
    devices = max(1, len(budget.engines))
    if slots.gpu is not None:
        need = slots.gpu.after(need, setup.capacity // devices * catalog.slot_bytes)
    else:
        _keep_process(setup, process - need.dense)
        need = replace(need, process=process, dense=0).plus(slots.beside)
    return Growth(
        slots.nbytes,
        need,
        catalog,
        description.keys_values,
        Workspace.of(model, catalog),
        context=description.context,
        at_least=max(slots.least, least_of(setup)),
        of=slots.gpu.OF if slots.gpu is not None else "",
        devices=devices,
        release=budget.engines[0].release if budget.engines else trim_heap,
    )


def _keep_process(setup: ModelSetup, process: int) -> None:
    """Leave to plans and later runs what a process takes beside dense parts and slots."""
    name, digest = name_of(host()), setup.fingerprint
    if not setup.remember:
        return
    try:
        files.update_records(digest, name, lambda records: records.with_load(process))
    except OutputError as error:
        log.warning("what the process takes is not kept: %s", error)
