"""The memory budget: what must be in memory besides the experts, before and after loading.

`--memory M` is the whole process: Python and its libraries, dense parts, KV cache, workspace,
staging; what is left becomes slots. With a GPU it is of the GPU's memory, and `--host-memory` is
the process: Python, CUDA's own, staging slots; what is left there keeps experts.
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

PREFILL_BLOCK = 512  # tokens; longer prompts are read in blocks of it, whatever the memory
AUTO_SHARE = 0.8  # of what is available: the rest is the user's
SLACK = 32 << 20  # what allocators keep and nobody can count

Reader = Callable[[], tuple[int, int]]  # (free, total) bytes of a device


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
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
    return _amount(memory, "--memory", available_bytes() + rss_bytes())


def _amount(given: str | int | None, option: str, available: int) -> int:
    if given is None or given == "auto":
        return int(available * AUTO_SHARE)
    return Amount.parse(given, option).of(available)


def capacity_for(
    budget: int,
    need: MemoryNeeds,
    catalog: Catalog,
    at_least: int = 1,
    label: str = "",
    devices: int = 1,
) -> int:
    """Slots that a budget (`label`, where it is not the process) leaves. BudgetError says how
    much would do. Of several GPUs it is each one's: all have as many slots as the first."""
    slots = (budget - need.total) // catalog.slot_bytes * devices
    if slots < at_least:
        enough = need.total + -(-at_least // devices) * catalog.slot_bytes
        raise BudgetError(
            f"a budget of {show_bytes(budget)}{label} is too small: {need} and {at_least}"
            f" experts need {show_bytes(enough)}; --memory {-(-enough // (1 << 20))}MiB would do"
        )
    return int(min(slots, catalog.experts))


class DeviceBudget:
    """`--memory` on a GPU: bytes, or a share of what was free when this was made.

    `read` says what is free now. BudgetError where more is asked for than is free: others may hold
    it, and a GPU cannot swap.
    """

    LABEL = " of the GPU's memory"

    def __init__(self, memory: str | int | None, read: Reader) -> None:
        self._read = read
        self.free, total = read()
        self.nbytes = _amount(memory, "--memory", self.free)
        if self.nbytes > self.free:
            raise BudgetError(
                f"--memory {memory}: of the GPU's {show_bytes(total)} {show_bytes(self.free)} are"
                " free, other processes hold the rest; a GPU's memory is --memory, what experts may"
                " take of the host's is --host-memory"
            )

    def after(self, slots: int) -> MemoryNeeds:
        """What is needed once everything is loaded, with so many bytes of slots: dense parts and
        libraries are what has gone since the start."""
        return MemoryNeeds(max(0, self.free - self._read()[0] - slots), 0, 0, 0, 0)


def host_slots(
    host_memory: str | int | None,
    catalog: Catalog,
    staging_slots: int,
    kv: int = 0,
    slot_bytes: int | None = None,
) -> tuple[int, int]:
    """(budget in bytes, experts that it has room for in host memory beside the process).

    `kv` bytes are for keys and values that are kept there; an expert takes `slot_bytes` where it is
    not kept as the disk has it. Without an amount as much is taken as
    there is, within `AUTO_SHARE`; none is enough then.
    BudgetError where a budget does not even hold the process and its staging slots.
    """
    available, process = available_bytes() + rss_bytes(), rss_bytes()
    budget = _amount(host_memory, "--host-memory", available)
    staging_slot, slot = slot_sizes(chunks_of(catalog))
    slot = slot_bytes or slot
    least = process + SLACK + staging_slots * staging_slot + kv
    if budget < least and host_memory not in (None, "auto"):
        keys = f" and keys and values {show_bytes(kv)}" if kv else ""
        raise BudgetError(
            f"--host-memory {host_memory} is too small: the process takes {show_bytes(process)}"
            f" and staging {show_bytes(staging_slots * staging_slot)}{keys};"
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


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations of a pass, in bytes: `fixed`, for each `token` of it, for each token of its
    `context`, and for each `pair` of one of these and one of those."""

    fixed: int
    token: int
    context: int
    pair: int

    @classmethod
    def of(cls, model: PreTrainedModel, catalog: Catalog) -> Workspace:
        """Experts' inputs and outputs, the widest of the dense parts, attention, logits."""
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
        # Of grouped heads all get keys and values of their own; scores are torch's, or its masks.
        repeated = 2 * heads * width * model.dtype.itemsize if kv_heads < heads else 0
        widened += expanded_bytes(model)
        return cls(int(widened + logits), experts + dense, repeated, heads * 10 if eager else 8)

    def nbytes(self, batch: int, length: int, tokens: int, block: int = PREFILL_BLOCK) -> int:
        """Of a pass of `length` tokens of each sequence, `tokens` with those before them.

        Room for a block of a prompt is kept also while single tokens are decoded.
        """
        rows = max(batch * length, min(block, tokens))
        attention = batch * tokens * (self.context + length * self.pair)
        return self.fixed + rows * self.token + attention
