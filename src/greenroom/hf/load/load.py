"""Load a model under a memory budget: the public `greenroom.load`.

Loading has five stages, each in a module of this package:
resolve   find the checkpoint and read its headers
describe  compute sizes from the model on the meta device
budget    compute how many experts fit into memory
choices   choose defaults: eviction policy, predictor, split, copies (`requested_setup`, which
          reads the user's options, is called before the budget is computed)
attach    load the non-expert weights, start the expert cache, install hooks
"""

from __future__ import annotations

import logging
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import LoadConfig, check_keywords, options_in
from greenroom.environment import late_import_warning
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.load.attach import Progress, attach
from greenroom.hf.load.budget import budget_for
from greenroom.hf.load.choices import complete_setup, requested_setup
from greenroom.hf.load.describe import Description
from greenroom.hf.load.resolve import resolve
from greenroom.hf.pictures.memory import picture_bytes
from greenroom.refusals import name_refusals
from greenroom.runtime.memory.system import gc_paused

log = logging.getLogger(__name__)


@check_keywords
def load(
    model: str, memory: str | int | None = None, cache: str | int | None = None,
    policy: str = "auto", kernels: str = "auto", device: str = "auto", *,
    host_memory: str | int | None = None, scope: str = "shared", pin: str | None = None,
    split: str = "off", miss_precision: str = "off", low_below: float | None = None,
    low_share: str = "12.5%", low_follow: bool = False, skip_below: float = 0.0,
    substitute_below: float = 0.0, cache_bias: float = 0.0, co_compute: str = "off",
    demand_order: str = "id", expert_order: str = "resident", prefetch: str = "auto",
    predictor: str | None = None, no_guard: bool = False, prefetch_rule: str = "value",
    predict_in: str = "auto", tau: int = 5000, context: int = 4096, kv: str = "dynamic",
    prompt_block: str | int = "auto", disk_tables: str | int = "64MiB", pressure: str = "auto",
    readers: int = 4, direct: str = "auto", repack: str | None = None, dtype: str = "auto",
    read_limit: str | int | None = None, config: str | None = None, threads: int | None = None,
    adapter: str | tuple[str, ...] | None = None, only_experts: str | None = None,
    spare_devices: int = 0, device_placement: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # fmt: skip
    """Load a Mixture-of-Experts model whose experts stay on disk.

    Returns (model, tokenizer) of transformers; `model.greenroom.materialize()` reads all experts,
    to train, save, copy or move the model. Raises GreenroomError. `model` is a folder, a GGUF file,
    a hub id (or owner/name:Q4_K_M), or `demo`. Options:
    memory: limit for the process (with a GPU, for GPU memory): "8GiB", "60%", "auto" (default)
    host_memory: with a GPU, the limit for the process in host memory, in the form of `memory`
    cache: size of the expert cache, instead of `memory`: "25%" of the experts, or "2GiB"
    pressure: give slots back while other processes need memory: auto (not with `cache`), on, off
    context, prompt_block: most tokens of a prompt and its answer; of a prompt in one pass ("auto")
    kv: type of the KV cache: dynamic, offloaded; int8 or int4, which change the output
    disk_tables: least size of an input embedding that stays on disk, "64MiB", or "off"
    device: auto (cuda if torch has it), cpu, cuda, "cuda:0,cuda:1", fake (for tests)
    spare_devices, device_placement: GPUs without experts at first; experts or layers on each, auto
    dtype: dtype to compute in: auto (that of the checkpoint), bfloat16, float16, float32
    kernels: code for experts: auto, eager (as transformers), native, precise, rounded, triton
    config: of a GGUF file, the folder, file or hub id with the original config and tokenizer
    adapter, only_experts: folder with changed experts (ESFT); file of the only experts to use
    threads, readers: numbers of threads that compute on the CPU, and that read experts from disk
    direct, read_limit: bypass the page cache (auto, on, off); most bytes a second, as "50MB"
    repack: folder for a copy of the model in which each expert is one range; made if missing
    policy: eviction policy of the expert cache: auto, lru, llru, moe-infinity, ...
    scope: division of slots among layers: shared (none), per-layer (equal), "N,N,...", a file
    pin: file of experts that are never evicted, made by `greenroom trace hot`
    split: share of each packed expert that is cached: off, auto, "0.5", "N,N,...", a file
    tau: with `split="auto"`, number of tokens after which slots are divided among layers anew
    prefetch: predictor of the experts to read early: auto, off, next-gate, learned, markov, ...
    prefetch_rule: which predicted experts to read early: value (what saves time), top-k, all
    predictor: file for `prefetch="learned"`, made by `greenroom train-predictor`
    no_guard: prefetch even while it makes tokens slower
    predict_in: thread that runs the predictor: auto, worker (its own), inline (that computes)
    demand_order: order in which a layer's missing experts are read: id, hottest (most tokens)
    expert_order: order of computing experts: resident (in memory first), cached, id, access
    co_compute: compute experts missing on a GPU on the CPU: off, auto (last bits may differ)
    Options for approximate experts, which change the output:
    miss_precision: compute missing experts from a pack's low-precision copies: off, int8, int4
    low_below: share of a token's gate weights below which a missing expert's copy is computed
    low_share, low_follow: share of the cache's memory for copies; read the exact expert afterwards
    skip_below: share of a token's gate weights below which a missing expert is left out
    substitute_below: share of gate weights below which another expert replaces a missing one
    cache_bias: share of the range of scores by which routers prefer experts in the cache
    """
    named, every = locals(), options_in(LoadConfig)
    return load_with(model, LoadConfig(**{each.name: named[each.name] for each in every}))


def load_with(
    source: str,
    config: LoadConfig,
    *,
    remember: bool = True,
    progress: Progress = lambda share, what: None,
    caller_bytes: int = 0,
    mtp: bool = False,
    picture_tokens: int = 0,
    variants: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Mixture-of-Experts model from a checked configuration.

    remember:     use the routing and memory figures of earlier runs, and save those of this run
    progress:     called with the share of loading time so far (0 to 1) and the name of a step
    caller_bytes: bytes of main memory that the calling program uses for itself
    picture_tokens: of a picture, for which memory is set aside; 0: the caller reads none
    mtp:          load the checkpoint's MTP layer too, which drafts tokens (`--speculate mtp`)
    variants:     let each token choose between the model itself and each of `--adapter`
    """
    if warning := late_import_warning():
        log.warning("%s", warning)
    with gc_paused(), name_refusals():
        progress(0.0, "reading the checkpoint's index")
        if config.repack is not None:
            from greenroom.hf.pack.repack import repacked

            source = repacked(source, config.repack, config.config, progress)
            config = replace(config, config=None)
        files, skeleton, on_a_gpu = resolve(source, config, mtp, variants)
        description = Description.of(skeleton, config, on_a_gpu)
        setup = requested_setup(files, description, config, remember)
        tokenizer = tokenizer_of(files.checkpoint)
        context, block = description.context, description.prompt_block
        pictures = picture_bytes(skeleton.model, context, picture_tokens, block)
        host_bytes = caller_bytes + pictures.pixels
        budget = budget_for(description, setup, config, host_bytes, pictures.activations)
        setup = complete_setup(description, budget, config)
        return attach(description, budget, setup, config, progress), tokenizer
