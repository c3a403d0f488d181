"""Load a model under a memory budget: the public `greenroom.load`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import (
    LOW_SHARE,
    Amount,
    LoadConfig,
    devices_of,
    options_checked,
    scope_of,
    show_bytes,
    split_of,
)
from greenroom.core.cache import compile_for, group_sizes
from greenroom.core.homes import spread
from greenroom.core.layout import Catalog
from greenroom.core.machine import name_of
from greenroom.core.pins import Pins
from greenroom.core.queue import staging_seats
from greenroom.core.scope import least_capacity
from greenroom.environment import warn_once
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
from greenroom.hf.source import GenerationSettings, Source
from greenroom.hf.split import split_experts
from greenroom.hf.watch import START, auto_split
from greenroom.plan import kept
from greenroom.policies import choose
from greenroom.policies import policy as named_policy
from greenroom.predictors import predictor
from greenroom.runtime.kernels import ahead
from greenroom.runtime.kernels.stored import dense_bytes
from greenroom.runtime.kernels.table import ON_GPUS
from greenroom.runtime.measure import host
from greenroom.runtime.memory import give_back, rss_bytes, trim_heap, uncollected

Progress = Callable[[float, str], None]

log = logging.getLogger(__name__)


@options_checked
def load(
    model: str,
    memory: str | int | None = None,
    cache: str | int | None = None,
    policy: str = "auto",
    kernels: str = "auto",
    device: str = "auto",
    *,
    host_memory: str | int | None = None,
    scope: str = "shared",
    pin: str | None = None,
    split: str = "off",
    miss_precision: str = "off",
    low_below: float | None = None,
    low_share: str = LOW_SHARE,
    low_follow: bool = False,
    skip_below: float = 0.0,
    substitute_below: float = 0.0,
    prefetch: str = "auto",
    predictor: str | None = None,
    no_guard: bool = False,
    co_compute: str = "off",
    context: int = 4096,
    kv: str = "dynamic",
    readers: int = 2,
    direct: str = "auto",
    read_limit: str | int | None = None,
    dtype: str = "auto",
    threads: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Mixture-of-Experts model whose experts stay on disk.

    Returns (model, tokenizer): an ordinary transformers model with `model.greenroom` for `stats()`,
    `resize()`, `detach()` and `materialize()`, before which it cannot be trained, saved, copied or
    moved. Raises a GreenroomError (see greenroom.errors) in one clear line.

    `model` is a Hugging Face folder, a GGUF file, a hub id, or `demo`. The options are those of
    `greenroom run`, whose help says more:

    memory: budget of the whole process, on a GPU of its memory: "8GiB", "60%" of what is
        available, "auto" (the default where `cache` is not given)
    cache: size of the expert cache alone, in place of `memory`: "25%" of the experts, "2GiB"
    policy: who is evicted: auto, lru, llru, moe-infinity, ...
    kernels: what computes the experts: auto, eager (the bits of transformers' eager), numba,
        rounded, triton
    device: auto (cuda where torch has it), cpu, cuda, "cuda:0,cuda:1", fake
    host_memory: with a GPU, the budget of the process in host memory
    scope: one cache for all layers (shared), one a layer (per-layer), "N,N,..." or a file
    pin: a file of `greenroom trace hot`, whose experts stay
    split: share of packed experts that stays, the rest being fetched: off, auto, "0.5", "N,N,...",
        a file
    miss_precision: serve misses of small gate weight from a pack's int8 or int4 copies, which
        changes the output: off, int8, int4
    low_below, low_share, low_follow: with `miss_precision`: the share of gate weights below which,
        the share of the cache for copies, whether the exact expert follows
    skip_below, substitute_below: leave out, or replace, misses below a share of the gate weights,
        which changes the output
    prefetch: a predictor that fetches experts ahead: auto, off, next-gate, learned, markov, ...
    predictor: the file of `greenroom train-predictor`, for the predictor learned
    no_guard: prefetch also where that is slower
    co_compute: with a GPU, compute missing experts on the host where that is sooner: off, auto
    context: tokens that the KV cache must have room for
    kv: how keys and values are kept: dynamic, fp8, int4, int2, offloaded
    readers, threads: threads that read experts, and that compute (default: all cores)
    direct: read past the page cache: auto, on, off
    read_limit: most bytes a second that are read, "50MB"
    dtype: what to compute in: auto (the checkpoint's), bfloat16, float16, float32
    """
    options = {name: value for name, value in locals().items() if name != "model"}
    return load_with(model, LoadConfig(**options))


def load_with(
    source: str,
    config: LoadConfig,
    *,
    remember: bool = True,
    progress: Progress = lambda share, what: None,
    beside: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` from a checked config; whether it shall `remember` what runs learn of the model.

    `progress` is told what begins, and roughly how much of the time has gone, from 0 to 1.
    `beside` bytes of a CPU's `--memory` are left to the caller.
    """
    with uncollected():
        return _load(source, config, remember, progress, beside)


def _load(
    source: str, config: LoadConfig, remember: bool, progress: Progress, beside: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if said := warn_once():
        log.warning("%s", said)
    progress(0.0, "reading the checkpoint's index")
    named_policy(config.policy).check_online()
    predictor(config.prefetch)  # or UnknownName, UsageError
    cuda = on_a_gpu(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = Checkpoint.open(resolve(source))
    origin = Source.of(checkpoint, config.dtype)
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
        source=origin,
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
        need = gpu.before(draft, parts) if gpu else needs(draft, parts, before).plus(beside)
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
    model: Any = draft.load("cpu" if engine is None else engine.device)
    generation = GenerationSettings(model)
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
    greenroom.keys_values, greenroom.generation = keys_values, generation
    try:
        greenroom.compile()
        give_back()
        beside_slots = rss_bytes()
        if gpu is None:
            greenroom.process_bytes = beside_slots - dense_bytes(model)
        if parts.budget_bytes is not None:
            # All that is there for good is there now: what is left of the budget becomes slots.
            if gpu is not None:
                need = gpu.after(need, parts.capacity // over * catalog.slot_bytes)
            else:
                _note(parts, beside_slots - need.dense)
                need = replace(need, process=beside_slots, dense=0).plus(beside)
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
        origin.stamps.check("while it was loaded")
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
