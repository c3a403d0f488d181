"""Compute the expert slots that a memory budget leaves besides everything else.

`--memory M` covers the entire process: Python and its libraries, dense parts, KV cache, workspace,
staging; the remainder becomes slots. With a GPU it covers the GPU's memory, and `--host-memory` the
process: Python, CUDA's own memory, staging slots; the remainder caches experts there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import PreTrainedModel

from greenroom.config import Amount, show_bytes
from greenroom.core.layout import PLAIN, Catalog
from greenroom.errors import BudgetError
from greenroom.runtime.cuda.host import slot_sizes
from greenroom.runtime.kernels.dense.stored import expanded_bytes
from greenroom.runtime.memory.system import available_bytes, rss_bytes
from greenroom.runtime.store.disk import CHUNK_BYTES, Chunk, cut

PREFILL_BLOCK = 512  # tokens; longer prompts are read in blocks of this size
AUTO_SHARE = 0.8  # of available memory; the remainder is left to other processes
LARGE_SHARE = 0.25  # of the needs: above it, an error suggests a shorter context
SLACK = 32 << 20  # for allocators, whose unused memory cannot be counted

Reader = Callable[[], tuple[int, int]]  # (free, total) bytes of a device


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a run needs besides its expert slots.

    process:   Python and its libraries, as measured
    dense:     all weights that are not experts
    kv_cache:  keys and values of the context
    workspace: activations of a forward pass
    staging:   buffers for reads from disk
    libraries: GPU memory that cuBLAS and Triton allocate
    """

    process: int
    dense: int
    kv_cache: int
    workspace: int
    staging: int
    libraries: int = 0

    @property
    def total(self) -> int:
        return (
            self.process
            + self.dense
            + self.kv_cache
            + self.workspace
            + self.staging
            + self.libraries
        )

    def __str__(self) -> str:
        parts = [
            ("process", self.process),
            ("dense parts", self.dense),
            ("KV cache", self.kv_cache),
            ("activations", self.workspace),
            ("read buffers", self.staging),
            ("GPU libraries", self.libraries),
        ]
        return ", ".join(
            f"{name} {show_bytes(nbytes)}" for name, nbytes in parts if nbytes or name == "KV cache"
        )


def budget_bytes(memory: str | int | None) -> int:
    """Return `--memory` in bytes.

    A share (or `auto`) is of available memory and this process's.
    """
    return _amount(memory, "--memory", available_bytes() + rss_bytes())


def _amount(value: str | int | None, option: str, available: int) -> int:
    if value is None or value == "auto":
        return int(available * AUTO_SHARE)
    return Amount.parse(value, option).of(available)


def capacity_for(
    budget: int,
    need: MemoryNeeds,
    catalog: Catalog,
    min_slots: int = 1,
    label: str = "",
    devices: int = 1,
) -> int:
    """Return the expert slots that a memory budget leaves, at most one per expert.

    `label` is the memory in words, where it is not the process's. The budget is of each of several
    GPUs, which all have the same number of slots. BudgetError, which names a sufficient budget,
    where fewer than `min_slots` are left.
    """
    slots = (budget - need.total) // catalog.slot_bytes * devices
    if slots < min_slots:
        enough = need.total + -(-min_slots // devices) * catalog.slot_bytes
        shorter = "; a shorter --context needs less" if need.kv_cache > LARGE_SHARE * enough else ""
        raise BudgetError(
            f"a budget of {show_bytes(budget)}{label} is too small: {need} and {min_slots}"
            f" experts need {show_bytes(enough)}; --memory {-(-enough // (1 << 20))}MiB would do"
            f"{shorter}"
        )
    return int(min(slots, catalog.experts))


class DeviceBudget:
    """GPU memory budget from `--memory`: bytes, or a share of free memory at the start.

    `read` returns free and total bytes now. BudgetError where more is asked for than is free: other
    processes may use it, and a GPU cannot swap.
    """

    LABEL = " of the GPU's memory"

    def __init__(self, memory: str | int | None, read: Reader) -> None:
        self._read = read
        self.free, total = read()
        self.nbytes = _amount(memory, "--memory", self.free)
        if self.nbytes > self.free:
            raise BudgetError(
                f"--memory {memory} is more than the GPU has free: {show_bytes(self.free)} of"
                f" {show_bytes(total)}; with a GPU, --memory is the GPU's memory and --host-memory"
                " the host's"
            )

    def after(self, slots: int) -> MemoryNeeds:
        """Return a loaded run's memory needs on the GPU besides its bytes of expert slots.

        Dense parts and libraries take what else became used since the start.
        """
        return MemoryNeeds(max(0, self.free - self._read()[0] - slots), 0, 0, 0, 0)


def host_slots(
    host_memory: str | int | None,
    catalog: Catalog,
    staging_slots: int,
    kv: int = 0,
    slot_bytes: int | None = None,
) -> tuple[int, int]:
    """Return the budget of host memory in bytes, and how many experts fit in it.

    `kv` bytes are for offloaded keys and values; an expert takes `slot_bytes` where its layout is
    not that of the disk. Without an amount it is AUTO_SHARE of available memory, and may leave room
    for no expert. BudgetError where an amount is too small for the process and its staging slots.
    """
    available, process = available_bytes() + rss_bytes(), rss_bytes()
    budget = _amount(host_memory, "--host-memory", available)
    staging_bytes, expert_bytes = slot_sizes(chunks_of(catalog))
    expert_bytes = slot_bytes or expert_bytes
    least = process + SLACK + staging_slots * staging_bytes + kv
    if budget < least and host_memory not in (None, "auto"):
        keys = f" and keys and values {show_bytes(kv)}" if kv else ""
        raise BudgetError(
            f"--host-memory {host_memory} is too small: the process takes {show_bytes(process)}"
            f" and staging {show_bytes(staging_slots * staging_bytes)}{keys};"
            f" --host-memory {-(-least // (1 << 20))}MiB would do"
        )
    return budget, min(max(0, (budget - least) // expert_bytes), catalog.experts)


def chunks_of(catalog: Catalog) -> Sequence[tuple[Chunk, ...]]:
    """Return the chunks in which each expert is read from the checkpoint's files."""
    return [
        tuple(chunk for extent in catalog.extents(e) for chunk in cut(extent, CHUNK_BYTES))
        for e in range(catalog.experts)
    ]


def experts_per_token(model: PreTrainedModel) -> int:
    """Return a layer's experts per token, by the config; 1 without an entry."""
    config = model.config.get_text_config()
    return int(getattr(config, "num_experts_per_tok", None) or 1)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a forward pass's activations, in bytes.

    They are `fixed` bytes, bytes for each new `token`, for each token of the `context`, and for
    each `pair` of a new token and a token of the context.
    """

    fixed: int
    token: int
    context: int
    pair: int

    @classmethod
    def of(cls, model: PreTrainedModel, catalog: Catalog) -> Workspace:
        """Compute a model's activation sizes: experts, widest dense layer, attention and logits."""
        config: Any = model.config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        weights = [
            layout.weight(spec.name)
            for layout in catalog.layouts
            for spec in layout.tensors
            if "." not in spec.name  # a companion of an encoded matrix
        ]
        inner = max(max(weight.shape) for weight in weights)
        widened = max(
            2 * weight.parts[0].nbytes if weight.encoding == PLAIN else 16 * prod(weight.shape)
            for weight in weights
        )
        experts = experts_per_token(model) * hidden * 8 + (hidden + inner) * 16
        dense = max(hidden, getattr(config, "intermediate_size", 0) or 0) * 24
        logits = 4 * config.vocab_size * 4
        eager = config._attn_implementation == "eager"
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or hidden // heads
        # Grouped keys and values are repeated for each head; a pair has scores, or a mask.
        repeated = 2 * heads * width * model.dtype.itemsize if kv_heads < heads else 0
        widened += expanded_bytes(model)
        return cls(int(widened + logits), experts + dense, repeated, heads * 10 if eager else 8)

    def nbytes(self, batch: int, length: int, tokens: int, block: int = PREFILL_BLOCK) -> int:
        """Return the activation bytes of a pass with `length` new tokens in each sequence.

        `tokens` counts the context too. A block of a prompt is always counted, also while single
        tokens are decoded.
        """
        rows = max(batch * length, min(block, tokens))
        attention = batch * tokens * (self.context + length * self.pair)
        return self.fixed + rows * self.token + attention
