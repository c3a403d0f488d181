"""Choose defaults while loading: policy, predictor, split experts, low-precision copies."""

from __future__ import annotations

import logging
from dataclasses import replace

from greenroom.config import Amount, LoadConfig, parse_device, scope_of, split_of
from greenroom.core.cache.pins import Pins
from greenroom.core.cache.state import group_sizes
from greenroom.hf.attach.predictors import check_prefetch
from greenroom.hf.attach.routers import check_bias
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.defaults import LEAST_SHARE, apply_defaults, auto_split
from greenroom.hf.load.budget import Budget, least_slots
from greenroom.hf.load.describe import Description, shrink_dense
from greenroom.hf.memory.approximate import check_copies, copies_of
from greenroom.hf.memory.devices import COMPILED, kernel_fallback, kernels_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import pieces_of
from greenroom.hf.memory.split import split_experts
from greenroom.plan.history import files
from greenroom.policies import choose

log = logging.getLogger(__name__)


def requested_setup(
    source: ModelSource, description: Description, config: LoadConfig, remember: bool
) -> ModelSetup:
    """Turn a run's options into a model's setup, with the fewest possible expert slots.

    Raises UsageError or PredictorError for options that do not fit this model.
    """
    skeleton, catalog, split = description.skeleton, description.skeleton.catalog, None
    shares = split_of(config.split)
    if shares is not None:  # auto is set when the capacity is known
        first = LEAST_SHARE if isinstance(shares, str) else shares
        catalog, split = split_experts(catalog, first, description.top_k)
    if (at := config.approximation()) is not None and at.bias:
        check_bias(skeleton.model, catalog, skeleton.variants is not None)
    check_copies(catalog, at)
    routers = catalog if skeleton.variants is None else skeleton.variants.of_model(catalog)
    check_prefetch(
        skeleton.model, routers, config.prefetch, config.predictor, description.fingerprint
    )
    kind, devices = parse_device(config.device)
    limit = config.read_limit
    setup = ModelSetup(
        catalog,
        capacity=1,
        policy=config.policy,
        scope=scope_of(config.scope),
        split=split,
        counts_split=shares == "auto",
        pins=Pins.load(config.pin, catalog.offsets) if config.pin is not None else None,
        prefetch=config.prefetch,
        predictor=config.predictor,
        guard=not config.no_guard,
        predict_in=config.predict_in,
        fingerprint=description.fingerprint,
        remember=remember,
        kernels=config.kernels,
        fake=kind == "fake",
        cuda=description.keys_values.on_a_gpu,
        devices=devices,
        spare_devices=config.spare_devices,
        config=config,
        readers=config.readers,
        direct=config.direct,
        read_limit=None if limit is None else Amount.parse(limit, "--read-limit").nbytes,
        context=description.context,
        prompt_block=description.prompt_block,
        keys_values=description.keys_values,
        source=source,
        variants=skeleton.variants,
        subset=skeleton.subset,
    )
    setup = replace(setup, kernels=kernels_of(setup), kernel_fallback=kernel_fallback(setup))
    shrink_dense(skeleton, config, setup.kernels in COMPILED)
    return replace(setup, capacity=least_slots(setup))


def complete_setup(description: Description, budget: Budget, config: LoadConfig) -> ModelSetup:
    """Complete a run's setup once the number of expert slots is known.

    Options that the user did not set get the model's stored settings, or defaults. If every expert
    has a slot, prefetching, splitting experts and approximating misses are switched off: they would
    have no effect.
    """
    skeleton, room = description.skeleton, budget.full_context_slots
    setup = apply_defaults(budget.setup, config, budget.initial_slots, description.top_k)
    all_have_slots = room >= setup.catalog.experts
    setup = replace(setup, policy=choose(setup.policy, room, setup.catalog.experts).name)
    if setup.counts_split:
        setup = _configure_split(description, setup, config, room)
    if all_have_slots:  # nothing is missed, so nothing is approximated or split
        setup = replace(setup, config=setup.config.without_approximation())
        if setup.split is not None:
            setup = replace(setup, catalog=skeleton.catalog, split=None)
    else:
        setup = _add_copies(description, setup, config, room)
    if (
        all_have_slots or skeleton.model.config.is_encoder_decoder
    ):  # predictors do not know its passes
        setup = replace(setup, prefetch="off")
    return setup


def _configure_split(
    description: Description, setup: ModelSetup, config: LoadConfig, room: int
) -> ModelSetup:
    """Choose each layer's share of the cache and its split, from expert counts of earlier runs."""
    history = (
        files.load_routing(setup.fingerprint) if setup.remember and setup.fingerprint else None
    )
    catalog, split, scope = auto_split(
        description.skeleton.catalog, history, room, description.top_k
    )
    scope = scope if config.scope == "shared" else setup.scope
    setup = replace(setup, catalog=catalog, split=split, scope=scope)
    setup = replace(setup, capacity=max(setup.capacity, least_slots(setup)))
    group_sizes(pieces_of(setup), max(room, setup.capacity), scope)  # or BudgetError
    return setup


def _add_copies(
    description: Description, setup: ModelSetup, config: LoadConfig, room: int
) -> ModelSetup:
    """Add the low-precision copies of experts that `--miss-precision` asks for."""
    copies = copies_of(setup.catalog, setup.approximation, room, description.top_k)
    if copies is None:
        return setup
    setup = replace(setup, copies=copies)
    least = least_slots(setup)
    slots = max(room, least) if config.cache is None else room
    group_sizes(pieces_of(setup), slots, setup.scope)  # or BudgetError
    return replace(setup, capacity=max(setup.capacity, least))
