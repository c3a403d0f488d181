"""Load a model under a memory budget: the public `greenroom.load`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import Amount, LoadConfig
from greenroom.core.cache import compile_for, split_capacity
from greenroom.errors import CheckpointError, UnknownName
from greenroom.hf.attach import Greenroom, Parts, slots_for
from greenroom.hf.budget import (
    PREFILL_BLOCK,
    budget_bytes,
    capacity_for,
    experts_per_token,
    kv_cache_bytes,
    needs,
)
from greenroom.hf.build import Draft
from greenroom.hf.checkpoint import Checkpoint, resolve
from greenroom.hf.fingerprint import fingerprint
from greenroom.hf.foresight import check
from greenroom.hf.kv import SPARE
from greenroom.policies import choose
from greenroom.policies import policy as named_policy
from greenroom.predictors import predictor
from greenroom.runtime.kernels import KERNELS, ahead
from greenroom.runtime.memory import give_back, rss_bytes, uncollected

log = logging.getLogger(__name__)


def load(
    model: str,
    memory: str | int | None = None,
    cache: str | int | None = None,
    policy: str = "auto",
    kernels: str = "auto",
    device: str = "auto",
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Mixture-of-Experts model whose experts stay on disk.

    `model` is a Hugging Face folder, a hub id, or `demo`. `memory` ("8GiB", "60%", "auto") is the
    budget of the whole process; `cache` ("25%", "2GiB") sizes the expert cache alone; they exclude
    each other, and neither means memory="auto". `options` are the further fields of
    `greenroom.config.LoadConfig`: scope, context, readers, direct, dtype, threads.

    Returns (model, tokenizer): an ordinary transformers model, whose `generate` works and gives
    the tokens of the full model, with `model.greenroom` for `stats()`, `resize()` and `detach()`.
    Raises a GreenroomError (see greenroom.errors) in one clear line.
    """
    return load_with(
        model,
        LoadConfig(
            memory=memory, cache=cache, policy=policy, kernels=kernels, device=device, **options
        ),
    )


def load_with(
    source: str, config: LoadConfig, *, remember: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` from a checked config; whether it shall `remember` what runs learn of the model."""
    with uncollected():
        return _load(source, config, remember)


def _load(
    source: str, config: LoadConfig, remember: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    named_policy(config.policy).check_online()
    predictor(config.prefetch)  # or UnknownName, UsageError
    if config.kernels != "auto" and config.kernels not in KERNELS:
        raise UnknownName("kernel", config.kernels, ["auto", *KERNELS])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = Checkpoint.open(resolve(source))
    draft = Draft.of(checkpoint, config.dtype)
    catalog, context = draft.catalog, context_of(draft.model, config.context)
    digest = fingerprint(checkpoint)
    check(draft.model, catalog, config.prefetch, config.predictor, digest)
    fewest = len(catalog.layers) if config.scope == "per-layer" else 1
    parts = Parts(
        catalog,
        capacity=fewest,
        policy=config.policy,
        scope=config.scope,
        prefetch=config.prefetch,
        predictor=config.predictor,
        guard=not config.no_guard,
        fingerprint=digest,
        remember=remember,
        kernels=config.kernels,
        fake=config.device == "fake",
        readers=config.readers,
        direct=config.direct,
        read_limit=None
        if config.read_limit is None
        else Amount.parse(config.read_limit, "--read-limit").nbytes,
        context=context,
        kv_cache_bytes=kv_cache_bytes(draft.model, context + SPARE),
    )
    tokenizer = _tokenizer(checkpoint)
    if config.cache is not None:
        parts = replace(parts, capacity=slots_for(config.cache, catalog))
        split_capacity(parts.capacity, len(catalog.layers), config.scope)  # or BudgetError
        room = parts.capacity
    else:
        budget = budget_bytes(config.memory)
        need = needs(draft, parts)
        least = max(fewest, min(experts_per_token(draft.model), catalog.experts))
        room = capacity_for(budget, need, catalog, least)  # before anything is loaded
        parts = replace(parts, budget_bytes=budget)
    chosen = choose(config.policy, room, catalog.experts)
    parts = replace(parts, policy=chosen.name)
    if room >= catalog.experts:  # nothing is ever fetched again
        parts = replace(parts, prefetch="off")
    model = draft.load()
    model.generation_config.prefill_chunk_size = PREFILL_BLOCK
    compile_for(chosen)
    ahead.wait()
    model.greenroom = greenroom = Greenroom(model, parts)
    try:
        greenroom.compile()
        give_back()
        if parts.budget_bytes is not None:
            # All that is there for good is there now: what is left of the budget becomes slots.
            need = replace(need, process=rss_bytes(), dense=0)
            greenroom.driver.resize(capacity_for(parts.budget_bytes, need, catalog, least))
        greenroom.warm_up()
    except BaseException:
        greenroom.detach()
        raise
    return model, tokenizer


def context_of(model: PreTrainedModel, context: int) -> int:
    """Tokens to make room for: as asked, but no more than the model can take."""
    config = model.config.get_text_config()
    return min(context, getattr(config, "max_position_embeddings", None) or context)


def _tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each tokenizer class fails in its own way
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: {reason}") from error
    if not len(tokenizer) > len(tokenizer.all_special_tokens):  # made up where there is no file
        raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: its files are missing")
    return tokenizer
