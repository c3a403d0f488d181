"""Load a model under a memory budget: the public `greenroom.load`.

Five stages, each a function: resolve (headers), describe (meta device), budget, place (defaults and
slots), attach (dense parts, slots, threads, hooks).
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import LoadConfig, check_keywords, options_in
from greenroom.environment import late_import_warning
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.load.attach import Progress, attach
from greenroom.hf.load.budget import budget_for
from greenroom.hf.load.describe import Description
from greenroom.hf.load.place import complete_setup, requested_setup
from greenroom.hf.load.resolve import resolve
from greenroom.runtime.memory.system import gc_paused

log = logging.getLogger(__name__)


@check_keywords
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
    low_share: str = "12.5%",
    low_follow: bool = False,
    skip_below: float = 0.0,
    substitute_below: float = 0.0,
    co_compute: str = "off",
    prefetch: str = "auto",
    predictor: str | None = None,
    no_guard: bool = False,
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

    `model` is a Hugging Face folder, a GGUF file, a hub id, or `demo`. `greenroom run --help` says
    more about the options:
    memory: budget of the process, on a GPU of its memory: "8GiB", "60%", "auto" (the default)
    cache: size of the expert cache alone, in place of `memory`: "25%" of the experts, "2GiB"
    policy: which expert is evicted: auto, lru, llru, moe-infinity, ...
    kernels: what computes the experts: auto, eager (transformers' bits), numba, rounded, triton
    device: auto (cuda where torch has it), cpu, cuda, "cuda:0,cuda:1", fake
    host_memory: with a GPU, the budget of the process in host memory
    scope: one cache for all layers (shared), one a layer (per-layer), "N,N,..." or a file
    pin: a file of `greenroom trace hot`, whose experts are never evicted
    split: share of packed experts that slots hold: off, auto, "0.5", "N,N,...", a file
    prefetch: a predictor that fetches experts ahead: auto, off, next-gate, learned, markov, ...
    predictor, no_guard: the file of the predictor learned; prefetch also where that is slower
    context, kv: tokens of the KV cache, and how it is kept: dynamic, fp8, int4, int2, offloaded
    readers, threads: threads that read experts, and that compute (default: all cores)
    direct, read_limit: read past the page cache (auto, on, off); most bytes a second, "50MB"
    dtype: type to compute in: auto (the checkpoint's), bfloat16, float16, float32
    miss_precision: serve misses from a pack's int8 or int4 copies, which changes the output
    low_below, low_share, low_follow: for `miss_precision`: which misses, room, exact experts later
    skip_below, substitute_below: leave out or replace misses, which changes the output
    co_compute: with a GPU, compute missing experts on the host where that is sooner: off, auto
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
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Mixture-of-Experts model from a checked configuration.

    `remember`: use what earlier runs learned of the model, and save it for later ones. `progress`
    is called with the share of the time that has passed, roughly, and the stage that begins.
    `caller_bytes` of a CPU's `--memory` are left to the caller.
    """
    if warning := late_import_warning():
        log.warning("%s", warning)
    with gc_paused():
        progress(0.0, "reading the checkpoint's index")
        files, skeleton, on_a_gpu = resolve(source, config)
        description = Description.of(skeleton, config, on_a_gpu)
        setup = requested_setup(files, description, config, remember)
        tokenizer = tokenizer_of(files.checkpoint)
        budget = budget_for(description, setup, config, caller_bytes)
        setup = complete_setup(description, budget, config)
        return attach(description, budget, setup, config, progress), tokenizer
