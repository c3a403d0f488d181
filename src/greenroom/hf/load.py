"""Load a model under a memory budget: the public `greenroom.load`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import Amount, LoadConfig, devices_of, scope_of, show_bytes, split_of
from greenroom.core.cache import compile_for, group_sizes
from greenroom.core.homes import spread
from greenroom.core.layout import Catalog
from greenroom.core.machine import name_of
from greenroom.core.pins import Pins
from greenroom.core.queue import staging_seats
from greenroom.core.scope import least_capacity
from greenroom.errors import CheckpointError, DeviceError, OutputError, UsageError
from greenroom.hf import learned
from greenroom.hf.attach import Greenroom
from greenroom.hf.budget import (
    PREFILL_BLOCK,
    DeviceBudget,
    Workspace,
    budget_bytes,
    capacity_for,
    experts_per_token,
    host_slots,
    needs,
    needs_at_first,
)
from greenroom.hf.build import Draft
from greenroom.hf.checkpoint import Checkpoint, resolve
from greenroom.hf.fingerprint import fingerprint
from greenroom.hf.foreign import foreign_errors
from greenroom.hf.foresight import check
from greenroom.hf.growth import Growth
from greenroom.hf.kv_bytes import KVBytes, kv_bytes
from greenroom.hf.lesser import check_copies, copies_of, thresholds
from greenroom.hf.parts import Parts
from greenroom.hf.places import COMPILED, engines_for, kernels_of, lanes_of
from greenroom.hf.settled import settled
from greenroom.hf.slots import pieces_of, slots_for
from greenroom.hf.split import split_experts
from greenroom.hf.watch import START, auto_split
from greenroom.plan import kept
from greenroom.policies import choose
from greenroom.policies import policy as named_policy
from greenroom.predictors import predictor
from greenroom.runtime.cuda.engine import device_errors
from greenroom.runtime.kernels import ahead
from greenroom.runtime.kernels.table import ON_GPUS
from greenroom.runtime.measure import host
from greenroom.runtime.memory import give_back, rss_bytes, trim_heap, uncollected

Progress = Callable[[float, str], None]

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

    `model` is a Hugging Face folder, a GGUF file, a hub id, or `demo`. `memory` ("8GiB", "60%",
    "auto") is the budget of the whole process; `cache` ("25%", "2GiB") sizes the expert cache
    alone; they exclude each other, and neither means memory="auto". `device` is cpu, cuda, fake, or
    auto: cuda where torch has it; there `memory` is of the GPU's, and `host_memory` is the
    process's. `options` are the further fields of `greenroom.config.LoadConfig`: scope, context,
    kv, readers, direct, dtype, threads.

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
    source: str,
    config: LoadConfig,
    *,
    remember: bool = True,
    progress: Progress = lambda share, what: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` from a checked config; whether it shall `remember` what runs learn of the model.

    `progress` is told what begins, and roughly how much of the time has gone, from 0 to 1.
    """
    with uncollected():
        return _load(source, config, remember, progress)


def _load(
    source: str, config: LoadConfig, remember: bool, progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    progress(0.0, "reading the checkpoint's index")
    named_policy(config.policy).check_online()
    predictor(config.prefetch)  # or UnknownName, UsageError
    cuda = on_a_gpu(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = Checkpoint.open(resolve(source))
    draft = Draft.of(checkpoint, config.dtype)
    catalog, context = draft.catalog, context_of(draft.model, config.context)
    shares, split = split_of(config.split), None
    top_k = experts_per_token(draft.model)
    if shares is not None:  # auto: what is known sets it when the capacity is known
        first = START if isinstance(shares, str) else shares
        catalog, split = split_experts(catalog, first, top_k)
    check_copies(catalog, config.miss_precision)
    digest = fingerprint(checkpoint)
    check(draft.model, catalog, config.prefetch, config.predictor, digest)
    keys_values = kv_bytes(draft.model, config.kv, block=PREFILL_BLOCK, on_a_gpu=cuda, room=context)
    if keys_values.kind.quantised and (saved := keys_values.saved(context)) <= 0:
        log.warning(
            "--kv %s takes %s more than --kv dynamic for %d tokens of this model, and is slower:"
            " it has too few layers",
            config.kv, show_bytes(-saved), context,
        )  # fmt: skip
    kind, devices = devices_of(config.device)
    parts = Parts(
        catalog,
        capacity=1,
        policy=config.policy,
        scope=scope_of(config.scope),
        split=split,
        thresholds=thresholds(config),
        precision=config.miss_precision,
        watch=shares == "auto",
        pins=Pins.load(config.pin, catalog.offsets) if config.pin is not None else None,
        prefetch=config.prefetch,
        predictor=config.predictor,
        guard=not config.no_guard,
        fingerprint=digest,
        remember=remember,
        kernels=config.kernels,
        fake=kind == "fake",
        cuda=cuda,
        devices=devices,
        co_compute=config.co_compute == "auto",
        readers=config.readers,
        direct=config.direct,
        read_limit=None
        if config.read_limit is None
        else Amount.parse(config.read_limit, "--read-limit").nbytes,
        context=context,
        kv_cache_bytes=keys_values.total(context),
        kv=keys_values.kind,
    )
    if kernels_of(parts) in COMPILED and draft.dtype is not torch.float32:  # or UsageError
        draft.keep_stored()
    fewest = least_capacity(pieces_of(parts), parts.scope)
    parts = replace(parts, capacity=fewest)
    tokenizer = tokenizer_of(checkpoint)
    engines, gpu = engines_for(parts), None
    engine = engines[0] if engines else None
    if engine is not None:
        memory = None if config.cache is not None else config.memory
        gpu = DeviceBudget(memory, lambda: min(each.memory() for each in engines))
    if engine is not None or config.host_memory is not None:
        parts = _with_host(parts, config, keys_values)  # or BudgetError, before anything is loaded
    if config.cache is not None:
        parts = replace(parts, capacity=slots_for(config.cache, catalog))
        group_sizes(pieces_of(parts), parts.capacity, parts.scope)  # or BudgetError
        room = first = parts.capacity
    else:
        budget = gpu.nbytes if gpu else budget_bytes(config.memory)
        before = _known(parts).process
        need = gpu.before(draft, parts) if gpu else needs(draft, parts, before)
        of = gpu.OF if gpu else ""
        tasks = parts.pins.tasks.values() if parts.pins is not None else ()
        pinned = max((task.experts.size for task in tasks), default=0)
        least = max(fewest, min(pinned + experts_per_token(draft.model), catalog.experts))
        over = max(1, len(engines))
        room = capacity_for(budget, need, catalog, least, of, over)  # before anything is loaded
        soon = needs_at_first(need, draft, parts, keys_values)
        first = capacity_for(budget, soon, catalog, least, of, over)
        parts = replace(parts, budget_bytes=budget)
    parts = settled(parts, config, first, top_k)
    chosen = choose(parts.policy, room, catalog.experts)
    parts = replace(parts, policy=chosen.name)
    decoder_only = not draft.model.config.is_encoder_decoder
    if shares == "auto":
        parts = _configured(parts, draft.catalog, room, config, top_k)
    parts = _lessened(parts, config, room, top_k)
    if room >= catalog.experts and parts.split is not None:  # every expert has a slot as a whole
        parts = replace(parts, catalog=draft.catalog, split=None)
    if room >= catalog.experts or not decoder_only:  # nothing to fetch, or nobody to foresee it
        parts = replace(parts, prefetch="off")
    progress(0.1, "loading the dense parts")
    model: Any = draft.load()
    if engine is not None:  # whatever a class keeps beside its parameters goes with them
        with device_errors("the dense parts"):
            model.to(engine.device)
    if decoder_only:  # an encoder reads a prompt as a whole
        model.generation_config.prefill_chunk_size = PREFILL_BLOCK
    for name, value in keys_values.kind.implementation.items():
        setattr(model.generation_config, name, value)
    progress(0.5, "compiling")
    compile_for(chosen)
    ahead.wait()
    if parts.host_bytes is not None:
        give_back()
        parts = _with_host(parts, config, keys_values)  # the process is what it is now
    progress(0.7, "making room for the experts")
    model.greenroom = greenroom = Greenroom(model, parts)
    greenroom.keys_values = keys_values
    try:
        greenroom.compile()
        give_back()
        if parts.budget_bytes is not None:
            # All that is there for good is there now: what is left of the budget becomes slots.
            if gpu is not None:
                need = gpu.after(need, parts.capacity // over * catalog.slot_bytes)
            else:
                greenroom.process_bytes = rss_bytes() - need.dense
                _note(parts, greenroom.process_bytes)
                need = replace(need, process=rss_bytes(), dense=0)
            release = trim_heap if engine is None else engine.release
            least = max(least, least_capacity(pieces_of(parts), parts.scope))
            growth = Growth(
                parts.budget_bytes, need, catalog, keys_values, Workspace.of(model, catalog),
                context=context, least=least, of=of, devices=over, release=release,
            )  # fmt: skip
            greenroom.grow(growth)
        greenroom.pin()
        progress(0.9, "reading what earlier runs used most")
        greenroom.warm_up()
    except BaseException:
        greenroom.detach()
        raise
    return model, tokenizer


def _known(parts: Parts) -> kept.Known:
    """What is kept of the model on this machine."""
    return kept.load(parts.fingerprint, name_of(host())) if parts.fingerprint else kept.Known()


def _note(parts: Parts, process: int) -> None:
    """Leave to plans and later runs what a process takes beside dense parts and slots."""
    known = _known(parts)
    if parts.remember and parts.fingerprint and (after := known.with_load(process)) is not known:
        try:
            kept.save(parts.fingerprint, name_of(host()), after)
        except OutputError as error:
            log.warning("what the process takes is not kept: %s", error)


def _configured(parts: Parts, catalog: Catalog, room: int, config: LoadConfig, top_k: int) -> Parts:
    """With the budgets and splits of layers that earlier runs' recordings ask for, in this room."""
    known = learned.load(parts.fingerprint) if parts.remember and parts.fingerprint else None
    catalog, split, scope = auto_split(catalog, known, room, top_k)
    scope = scope if config.scope == "shared" else parts.scope
    parts = replace(parts, catalog=catalog, split=split, scope=scope)
    least = least_capacity(pieces_of(parts), scope)
    parts = replace(parts, capacity=max(parts.capacity, least))
    group_sizes(pieces_of(parts), max(room, parts.capacity), scope)  # or BudgetError
    return parts


def _lessened(parts: Parts, config: LoadConfig, room: int, top_k: int) -> Parts:
    """With the low-precision copies that are asked for; nothing is missed, and so all is exact,
    where every expert has a slot."""
    if room >= parts.catalog.experts:
        return replace(parts, thresholds=None, precision="off")
    parts = replace(parts, copies=copies_of(parts.catalog, config, room, top_k))
    if parts.copies is None:
        return parts
    pieces = pieces_of(parts)
    least = least_capacity(pieces, parts.scope)
    group_sizes(pieces, max(room, least) if config.cache is None else room, parts.scope)
    return replace(parts, capacity=max(parts.capacity, least))


def on_a_gpu(config: LoadConfig) -> bool:
    """Whether the experts are computed on a GPU: where it is asked for, or there is one.

    DeviceError where there is none, UsageError for options that go with one only.
    """
    there, (kind, numbers) = torch.cuda.is_available(), devices_of(config.device)
    if kind == "cuda" and not there:
        built = torch.version.cuda or torch.version.hip
        reason = "no GPU answers" if built else "this torch was built without CUDA"
        raise DeviceError(f"--device {config.device}: {reason}; --device cpu computes here")
    if kind == "cuda" and max(numbers) > 0 and max(numbers) >= (count := torch.cuda.device_count()):
        known = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"--device {config.device}: the GPUs here are {known}")
    chosen = kind == "cuda" or (kind == "auto" and there)
    if config.host_memory is not None and not (chosen or kind == "fake"):
        raise UsageError("--host-memory is for a GPU: on a CPU, --memory is all there is")
    if config.kernels == ON_GPUS and not (chosen or kind == "fake"):
        raise UsageError(
            "--kernels triton computes on a GPU: take numba or eager, or --device cuda"
        )
    return chosen


def _with_host(parts: Parts, config: LoadConfig, keys_values: KVBytes) -> Parts:
    """The host tier that the budget has room for."""
    lanes = spread(lanes_of(parts), len(parts.devices))
    seats, beside = staging_seats(lanes), keys_values.on_host(parts.context)
    stride = parts.catalog.slot_bytes if parts.co_compute else None
    budget, slots = host_slots(config.host_memory, parts.catalog, seats, beside, stride)
    kept = choose(config.policy, slots, parts.catalog.experts).name
    return replace(parts, host_bytes=budget, host_capacity=slots, host_policy=kept)


def context_of(model: PreTrainedModel, context: int) -> int:
    """Tokens to make room for: as asked, but no more than the model can take."""
    config = model.config.get_text_config()
    return min(context, getattr(config, "max_position_embeddings", None) or context)


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer; CheckpointError where there is none that can be used."""
    with (
        foreign_errors(f"{checkpoint.folder}: no usable tokenizer"),
        checkpoint.read_by_transformers(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(**checkpoint.source, trust_remote_code=False)
    if not len(tokenizer) > len(tokenizer.all_special_tokens):  # made up where there is no file
        raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: its files are missing")
    return tokenizer
