"""Compute how many expert slots a memory budget leaves besides everything else.

Without a GPU, `--memory M` covers the entire process: Python and its libraries, non-expert weights,
KV cache, activations and staging slots. The remainder becomes slots of the expert cache. With a
GPU, `--memory` covers the GPU's memory, and `--host-memory` covers the process: Python, CUDA's own
memory and staging slots. The remainder of host memory caches further experts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, prod
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.config import Amount, show_bytes
from greenroom.core.layout import PLAIN, Catalog, WeightSpec
from greenroom.core.pieces import Pieces
from greenroom.core.transfers.tiers import host_slot_groups, least_host_slots
from greenroom.errors import BudgetError
from greenroom.hf.kv.sizes import layer_configs
from greenroom.runtime.cuda.host import piece_rooms, slot_sizes, slots_by_size
from greenroom.runtime.kernels.dense.stored import expanded_bytes
from greenroom.runtime.kernels.matrix import unsupported_reason
from greenroom.runtime.memory.system import available_bytes, rss_bytes
from greenroom.runtime.store.disk import CHUNK_BYTES, Chunk, cut

AUTO_SHARE = 0.8  # of available memory; the remainder is left to other processes
LARGE_SHARE = 0.25  # of the needs: above it, an error suggests a shorter context
ROWS_EXPANDED = 64  # rows of float32 that a thread of the compiled kernel may need for scratch
SLACK = 32 << 20  # for allocators, whose unused memory cannot be counted
VARIATION = 4 << 20  # between two starts of a process: an advised budget has room for it
# Attributes of configs with the experts of a token; most of transformers' configs have the first.
EXPERTS_PER_TOKEN = "num_experts_per_tok", "top_k_experts", "moe_top_k"

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
            ("the process", self.process),
            ("non-expert weights", self.dense),
            ("the KV cache", self.kv_cache),
            ("activations", self.workspace),
            ("read buffers", self.staging),
            ("GPU libraries", self.libraries),
        ]
        return ", ".join(
            f"{show_bytes(nbytes)} for {name}"
            for name, nbytes in parts
            if nbytes or name == "the KV cache"
        )


def budget_bytes(memory: str | int | None) -> int:
    """Return the value of `--memory` in bytes, for a run without a GPU.

    A share is taken of the system's available memory plus this process's resident memory. `auto`
    and None are a share of 80%.
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
    devices: int | Fraction = 1,
) -> int:
    """Return the number of expert slots that a memory budget leaves.

    It is at most the number of experts.

    budget:  bytes; with several GPUs, of each of them
    label:   which memory the budget is of, for the error message; "" for the process's memory
    devices: number of GPUs, each with as many slots as the memory holds (`Pieces.equal_devices`)
    Raises BudgetError, which names a sufficient budget, if fewer than `min_slots` are left.
    """
    slots = floor((budget - need.total) // catalog.slot_bytes * devices)
    if slots < min_slots:
        experts = ceil(min_slots / devices)
        enough = need.total + experts * catalog.slot_bytes
        advised = -(-(enough + VARIATION) // (1 << 20))
        shorter = " or a shorter --context" if need.kv_cache > LARGE_SHARE * enough else ""
        raise BudgetError(
            f"the model needs {show_bytes(enough)}{label}, more than the budget of"
            f" {show_bytes(budget)}: {need} and {show_bytes(experts * catalog.slot_bytes)} for"
            f" {experts} experts; give --memory {advised}MiB{shorter}"
        )
    return min(slots, catalog.experts)


class DeviceBudget:
    """GPU memory budget from `--memory`: bytes, or a share of the GPU's free memory at start.

    `read` returns the free and total bytes of the GPU now. Raises BudgetError if the budget exceeds
    free memory, since a GPU cannot swap.
    """

    LABEL = " of the GPU's memory"

    def __init__(self, memory: str | int | None, read: Reader) -> None:
        self._read = read
        self.free, total = read()
        self.nbytes = _amount(memory, "--memory", self.free)
        if self.nbytes > self.free:
            raise BudgetError(
                f"--memory {memory} is more than the GPU has free: {show_bytes(self.free)} of"
                f" {show_bytes(total)}: give less; with a GPU, --memory limits the GPU's memory and"
                " --host-memory the process's memory on the host"
            )

    def after(self, slots: int) -> MemoryNeeds:
        """Return a loaded run's memory needs on the GPU besides `slots` bytes of expert slots.

        All GPU memory that became used since the start counts, except the slots.
        """
        return MemoryNeeds(max(0, self.free - self._read()[0] - slots), 0, 0, 0, 0)


def host_slots(
    host_memory: str | int | None,
    catalog: Catalog,
    staging_slots: int,
    kv: int = 0,
    slot_bytes: int | None = None,
    pieces: Pieces | None = None,
    caller_bytes: int = 0,
) -> tuple[int, int]:
    """Return the `--host-memory` budget in bytes, and how many experts it can cache.

    host_memory: value of the option; None and `auto` are 80% of available memory, which may leave
                 room for no expert
    kv:          bytes of keys and values that are offloaded to host memory
    slot_bytes:  bytes of an expert, if cached experts have another layout than on disk
    pieces:      the experts' segments or copies, which are cached too; None: experts are unsplit
    caller_bytes: bytes that the calling program uses for itself
    Raises BudgetError if a given budget is too small for the process and its staging slots.
    """
    process = rss_bytes()
    available, process = available_bytes() + process, process + caller_bytes
    budget = _amount(host_memory, "--host-memory", available)
    chunks = chunks_of(catalog, pieces)
    staging_bytes, expert_bytes = slot_sizes(chunks)
    least = process + SLACK + staging_slots * staging_bytes + kv
    if budget < least and host_memory not in (None, "auto"):
        keys = f", {show_bytes(kv)} for keys and values" if kv else ""
        raise BudgetError(
            f"the process needs {show_bytes(least)} of host memory, more than --host-memory"
            f" {host_memory}: {show_bytes(process)} for Python and its libraries"
            f"{keys}, {show_bytes(staging_slots * staging_bytes)} for buffers between disk and GPU"
            f" and {show_bytes(SLACK)} for allocators;"
            f" give --host-memory {-(-least // (1 << 20))}MiB"
        )
    room = max(0, budget - least)
    if pieces is not None:
        return budget, _slots_in_groups(pieces, chunks, room)
    return budget, min(room // (slot_bytes or expert_bytes), catalog.experts)


def _slots_in_groups(pieces: Pieces, chunks: Sequence[tuple[Chunk, ...]], room: int) -> int:
    """Return how many experts fit into host memory with their segments or copies.

    `room` is in bytes; `chunks` has the file chunks of each piece. 0 if not enough experts fit.
    """
    rooms = piece_rooms(chunks)

    def nbytes(capacity: int) -> int:
        sizes = slots_by_size(rooms, host_slot_groups(pieces, capacity))
        return sum(number * nbytes for number, nbytes in sizes)

    possible = range(least_host_slots(pieces), pieces.experts + 1)
    fitting = bisect_right(possible, room, key=nbytes)
    return possible[fitting - 1] if fitting else 0


def chunks_of(catalog: Catalog, pieces: Pieces | None = None) -> Sequence[tuple[Chunk, ...]]:
    """Return, for each expert id, the file chunks in which the expert is read.

    With `pieces`, the ids are those of experts, segments or copies; one without bytes has none.
    """
    present = [True] * catalog.experts if pieces is None else (pieces.nbytes > 0).tolist()
    return [
        tuple(chunk for extent in catalog.extents(e) for chunk in cut(extent, CHUNK_BYTES))
        if stored
        else ()
        for e, stored in enumerate(present)
    ]


def experts_per_token(model: PreTrainedModel) -> int:
    """Return the most experts that a token uses in a layer; 1 if the config has no entry."""
    text = model.config.get_text_config()
    configs = text, getattr(text, "ffn_config", None)  # DBRX's, of its MoE blocks
    entries = (getattr(config, name, None) for config in configs for name in EXPERTS_PER_TOKEN)
    entry: int | list[int] = next((entry for entry in entries if entry), 1)
    return max(entry) if isinstance(entry, list) else entry  # Hunyuan's list has a number a layer


def _expansion(weight: WeightSpec, compiled: bool) -> int:
    """Return the bytes that an expert's matrix takes while it is computed, besides its slot."""
    if compiled and not any(map(unsupported_reason, weight.halves)):
        return ROWS_EXPANDED * 4 * max(weight.shape) * torch.get_num_threads()
    return 2 * weight.parts[0].nbytes if weight.encoding == PLAIN else 16 * prod(weight.shape)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a forward pass's activations, in bytes.

    fixed:   bytes that do not depend on the number of tokens
    token:   bytes for each new token
    context: bytes for each token of the context
    pair:    bytes for each pair of a new token and a token of the context
    """

    fixed: int
    token: int
    context: int
    pair: int

    @classmethod
    def of(cls, model: PreTrainedModel, catalog: Catalog, compiled: bool) -> Workspace:
        """Compute activation sizes from a model's config and from its experts' layouts.

        `compiled`: compiled kernels on a CPU compute the experts, and expand a few rows at a time.
        """
        config: Any = model.config.get_text_config()
        layers, hidden = layer_configs(config), config.hidden_size
        weights = [
            layout.weight(spec.name)
            for layout in catalog.layouts
            for spec in layout.tensors
            if "." not in spec.name  # a companion of an encoded matrix
        ]
        inner = max(max(weight.shape) for weight in weights)
        widened = max(_expansion(weight, compiled) for weight in weights)
        top_k = experts_per_token(model)
        experts = top_k * hidden * 8 + (hidden + inner) * 16
        if compiled:  # a pass has the activations of all chosen experts at the same time
            experts = max(experts, top_k * (2 * inner + hidden) * 4 + hidden * 16)
        dense = max([hidden, *(getattr(c, "intermediate_size", 0) or 0 for c in layers)]) * 24
        logits = 4 * config.vocab_size * 4
        eager = config._attn_implementation == "eager"
        heads, repeated = max(each.num_attention_heads for each in layers), 0
        for each in layers:
            kv_heads = getattr(each, "num_key_value_heads", None) or each.num_attention_heads
            width = getattr(each, "head_dim", None) or hidden // each.num_attention_heads
            if kv_heads < each.num_attention_heads:  # keys and values are repeated for each head
                nbytes = 2 * each.num_attention_heads * width * model.dtype.itemsize
                repeated = max(repeated, nbytes)
        widened += expanded_bytes(model)
        pair = heads * 10 if eager else 8  # scores, or a mask
        return cls(int(widened + logits), experts + dense, repeated, pair)

    def nbytes(self, batch: int, length: int, tokens: int, block: int) -> int:
        """Return the activation bytes of a pass of `batch` sequences.

        length: new tokens of each sequence
        tokens: all tokens of a sequence, new ones included
        block:  tokens of a prompt that a pass computes at once; a pass with fewer counts as `block`
        """
        rows = max(batch * length, min(block, tokens))
        attention = batch * tokens * (self.context + length * self.pair)
        return self.fixed + rows * self.token + attention
