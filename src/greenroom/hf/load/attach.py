"""Stage 5 of loading: load the dense parts, attach the cache, and give it what memory is left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.core.cache.cache import compile_for
from greenroom.core.machine import name_of
from greenroom.errors import OutputError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.kv.kinds import Kind
from greenroom.hf.load.budget import Budget, least_of, with_host
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import PREFILL_BLOCK, Workspace
from greenroom.hf.memory.growth import Growth
from greenroom.hf.memory.setup import ModelSetup
from greenroom.plan.history import files
from greenroom.policies import policy
from greenroom.runtime.kernels import precompile as ahead
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.measure.bandwidth import host
from greenroom.runtime.memory.system import give_back, rss_bytes

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
    generation = _replace_settings(model, description.keys_values.kind)
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
        if budget.growth is not None:
            greenroom.grow(_loaded(model, budget, budget.growth, process))
        greenroom.pin()
        progress(0.9, "reading what earlier runs used most")
        greenroom.warm_up()
        assert setup.source is not None
        setup.source.stamps.check("while it was loaded")
    except BaseException:
        greenroom.detach()
        raise
    return model


def _replace_settings(model: Any, kv: Kind) -> Any:
    """Have `generate` read prompts in blocks and keep keys and values as `kv` says. Returns the
    config that the model had."""
    settings = model.generation_config
    before = deepcopy(settings)
    if not model.config.is_encoder_decoder:  # an encoder reads a prompt as a whole
        settings.prefill_chunk_size = PREFILL_BLOCK
    for name, value in kv.implementation.items():
        setattr(settings, name, value)
    return before


def _loaded(model: Any, budget: Budget, growth: Growth, process: int) -> Growth:
    """All that is there for good is there now: what is left of the budget becomes slots."""
    setup, need, catalog = model.greenroom.parts, growth.need, growth.catalog
    if budget.gpu is not None:
        need = budget.gpu.after(setup.capacity // growth.devices * catalog.slot_bytes)
    else:
        _keep_process(setup, process - need.dense)
        need = replace(need, process=process + budget.beside, dense=0)
    workspace, least = Workspace.of(model, catalog), max(growth.at_least, least_of(setup))
    return replace(growth, need=need, workspace=workspace, at_least=least)


def _keep_process(setup: ModelSetup, process: int) -> None:
    """Leave to plans and later runs what a process takes beside dense parts and slots."""
    name, digest = name_of(host()), setup.fingerprint
    if not setup.remember:
        return
    try:
        files.update_records(digest, name, lambda records: records.with_load(process))
    except OutputError as error:
        log.warning("what the process takes is not kept: %s", error)
