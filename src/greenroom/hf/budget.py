"""The memory budget: what must be in memory besides the experts, before and after loading.

`--memory M` is the whole process: Python and its libraries, dense parts, KV cache, workspace,
staging; what is left becomes slots. With a GPU it is of the GPU's memory, and `--host-memory` is
the process: Python, CUDA's own, staging seats; what is left there keeps experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.config import Amount, show_bytes
from greenroom.core.layout import PLAIN, Catalog
from greenroom.errors import BudgetError
from greenroom.hf.build import Draft
from greenroom.hf.parts import Parts
from greenroom.runtime.cuda.host import sizes
from greenroom.runtime.memory import available_bytes, rss_bytes
from greenroom.runtime.store import CHUNK_BYTES, Chunk, cut

PREFILL_BLOCK = 512  # tokens; longer prompts are read in blocks of it, whatever the memory
AUTO_SHARE = 0.8  # of what is available: the rest is the user's
COMPILERS = 160 << 20  # what compiling the kernels adds to the process; measured once it is done
SLACK = 32 << 20  # what allocators keep and nobody can count
LIBRARIES = 256 << 20  # what cuBLAS and Triton take of a GPU when they are first used

Reader = Callable[[], tuple[int, int]]  # (free, total) bytes of a device


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes beside the slots. `process` is measured, the others are computed."""

    process: int
    dense: int
    kv_cache: int
    workspace: int
    staging: int

    @property
    def total(self) -> int:
        return self.process + self.dense + self.kv_cache + self.workspace + self.staging

    def __str__(self) -> str:
        process = f"process {show_bytes(self.process)}, " if self.process else ""
        return (
            f"{process}dense parts {show_bytes(self.dense)},"
            f" KV cache {show_bytes(self.kv_cache)},"
            f" workspace {show_bytes(self.workspace + self.staging)}"
        )


def budget_bytes(memory: str | int | None) -> int:
    """`--memory` in bytes; a share (or `auto`) is of what this process has and could have now."""
    available = available_bytes() + rss_bytes()
    if memory in (None, "auto"):
        return int(available * AUTO_SHARE)
    return Amount.parse(memory, "--memory").of(available)


def needs(draft: Draft, parts: Parts) -> Needs:
    """Before anything is loaded: the draft's model is on the meta device."""
    return Needs(
        process=rss_bytes() + COMPILERS,
        dense=draft.dense_bytes,
        kv_cache=parts.kv_cache_bytes,
        workspace=workspace_bytes(draft.model, parts.catalog, parts.context) + SLACK,
        staging=parts.readers * (CHUNK_BYTES + (1 << 20)),
    )


def capacity_for(
    budget: int, need: Needs, catalog: Catalog, at_least: int = 1, of: str = ""
) -> int:
    """Slots that a budget (`of` what, where it is not the process) leaves. BudgetError says how
    much would do."""
    slots = (budget - need.total) // catalog.slot_bytes
    if slots < at_least:
        enough = need.total + at_least * catalog.slot_bytes
        raise BudgetError(
            f"a budget of {show_bytes(budget)}{of} is too small: {need} and {at_least}"
            f" experts need {show_bytes(enough)}; --memory {-(-enough // (1 << 20))}MiB would do"
        )
    return int(min(slots, catalog.experts))


class DeviceBudget:
    """`--memory` on a GPU: bytes, or a share of what was free when this was made.

    `read` says what is free now. BudgetError where more is asked for than is free: others may hold
    it, and a GPU cannot swap.
    """

    OF = " of the GPU's memory"

    def __init__(self, memory: str | int | None, read: Reader) -> None:
        self._read = read
        self.free, total = read()
        if memory in (None, "auto"):
            self.nbytes = int(self.free * AUTO_SHARE)
        else:
            self.nbytes = Amount.parse(memory, "--memory").of(self.free)
        if self.nbytes > self.free:
            raise BudgetError(
                f"--memory {memory}: of the GPU's {show_bytes(total)} {show_bytes(self.free)} are"
                " free, other processes hold the rest; a GPU's memory is --memory, what experts may"
                " take of the host's is --host-memory"
            )

    def before(self, draft: Draft, parts: Parts) -> Needs:
        """What is needed beside the slots, before anything is loaded."""
        workspace = workspace_bytes(draft.model, parts.catalog, parts.context)
        return Needs(0, draft.dense_bytes, parts.kv_cache_bytes, workspace + SLACK, LIBRARIES)

    def after(self, need: Needs, slots: int) -> Needs:
        """The same once everything is loaded, with so many bytes of slots: dense parts and
        libraries are what has gone since the start."""
        used = max(0, self.free - self._read()[0] - slots)
        return Needs(used, 0, need.kv_cache, need.workspace, 0)


def host_slots(host_memory: str | int | None, catalog: Catalog, seats: int) -> tuple[int, int]:
    """(budget in bytes, experts that it has room for in host memory beside the process).

    Without an amount as much is taken as there is, within `AUTO_SHARE`; none is enough then.
    BudgetError where a budget does not even hold the process and its staging seats.
    """
    available, process = available_bytes() + rss_bytes(), rss_bytes()
    auto = host_memory in (None, "auto")
    if auto:
        budget = int(available * AUTO_SHARE)
    else:
        budget = Amount.parse(host_memory, "--host-memory").of(available)  # type: ignore[arg-type]
    seat, slot = sizes(chunks_of(catalog))
    least = process + SLACK + seats * seat
    if budget < least and not auto:
        raise BudgetError(
            f"--host-memory {host_memory} is too small: the process takes {show_bytes(process)}"
            f" and staging {show_bytes(seats * seat)};"
            f" --host-memory {-(-least // (1 << 20))}MiB would do"
        )
    return budget, min(max(0, (budget - least) // slot), catalog.experts)


def chunks_of(catalog: Catalog) -> Sequence[tuple[Chunk, ...]]:
    """How every expert is cut, as the store will do it."""
    return [
        tuple(chunk for extent in catalog.extents(e) for chunk in cut(extent, CHUNK_BYTES))
        for e in range(catalog.experts)
    ]


def experts_per_token(model: PreTrainedModel) -> int:
    """What one token asks of a layer at once, as far as the config says."""
    config = model.config.get_text_config()
    return int(getattr(config, "num_experts_per_tok", None) or 1)


def kv_cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of the cache for `context` tokens, and of the largest layer once more.

    A layer's keys and values are copied as they grow. Measured by a pass on the meta device.
    """
    try:
        layers = _cache_of(model)
    except Exception:  # a model whose forward cannot run without data
        return _kv_by_config(model, context)
    per_token = sum(growing for growing, _ in layers) + max(growing for growing, _ in layers)
    return per_token * context + sum(fixed for _, fixed in layers)


def _cache_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Each layer's (bytes a token, bytes of states that do not grow with the tokens)."""
    tokens = 47  # no other dimension is likely to be that
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    answer = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        cache: Any = model(input_ids=ids, **answer, use_cache=True).past_key_values
    sizes = []
    layers = (
        cache.layers
        if not answer
        else (cache.self_attention_cache.layers + cache.cross_attention_cache.layers)
    )
    for layer in layers:
        tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        nbytes = [(t.numel() * t.element_size(), tokens in t.shape) for t in tensors]
        growing = sum(n for n, grows in nbytes if grows) // tokens
        sizes.append((growing, sum(n for n, grows in nbytes if not grows)))
    return sizes


def _kv_by_config(model: PreTrainedModel, context: int) -> int:
    """Full attention in every layer: 2 x layers x heads x width x tokens."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    return int(2 * (layers + 1) * heads * width * context * model.dtype.itemsize)


def workspace_bytes(model: PreTrainedModel, catalog: Catalog, context: int) -> int:
    """Activations of one block of a prompt: experts' inputs and outputs, attention, logits."""
    config = model.config.get_text_config()
    tokens = min(context, PREFILL_BLOCK)
    rows = tokens * experts_per_token(model)
    hidden, heads = config.hidden_size, config.num_attention_heads
    weights = [
        layout.weight(spec.name)
        for layout in catalog.layouts
        for spec in layout.tensors
        if "." not in spec.name  # a companion of an encoded matrix
    ]
    inner = max(max(weight.shape) for weight in weights)
    experts = rows * hidden * 8 + tokens * (hidden + inner) * 16
    widened = max(
        2 * weight.parts[0].nbytes if weight.encoding == PLAIN else 16 * prod(weight.shape)
        for weight in weights
    )
    dense = tokens * max(hidden, getattr(config, "intermediate_size", 0) or 0) * 24
    scores = heads * tokens * context * 8 if config._attn_implementation == "eager" else 0
    logits = 4 * config.vocab_size * 4
    return int(experts + widened + dense + scores + logits)
