"""Sizes and shape of a model, as the planner needs them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.pieces import Ints
from greenroom.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes and shape of a model, from its config and safetensors headers.

    expert_bytes:   bytes moved for one expert (a mean where layers differ)
    slot_bytes:     bytes of an expert in memory
    dense_bytes:    weights that stay in memory
    read_bytes:     dense bytes that one token reads: all but the input embedding, unless the head
                    is tied
    overhead_bytes: Python, libraries, compiled kernels, activations, staging
    kv_bytes:       keys and values of the first block of a prompt
    full_bytes:     further bytes of keys, values and activations with `context` tokens; slots are
                    given up for them as the context grows
    """

    name: str
    fingerprint: str
    experts_per_layer: tuple[int, ...]
    top_k: int
    expert_bytes: int
    slot_bytes: int
    dense_bytes: int
    read_bytes: int
    overhead_bytes: int
    kv_bytes: int
    context: int
    full_bytes: int = 0
    low: float = 0.0  # a low-precision copy's share of its expert's bytes; 0: there are no copies
    nested: bool = False  # whether copies are a part of their experts
    segments: bool = False  # whether the pack's experts can be split

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def experts(self) -> int:
        return sum(self.experts_per_layer)

    @property
    def offsets(self) -> Ints:
        """Return each layer's first dense expert id, [layers + 1]."""
        return np.array([0, *accumulate(self.experts_per_layer)], np.int64)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes outside of the expert cache, with a short context."""
        return self.dense_bytes + self.overhead_bytes + self.kv_bytes

    @property
    def least_slots(self) -> int:
        """Return the fewest usable cache slots: the experts of one token in one layer."""
        return min(self.top_k, self.experts)

    @property
    def least_memory(self) -> int:
        """Return the smallest memory budget for a model with a full context."""
        return self.fixed_bytes + self.full_bytes + self.least_slots * self.slot_bytes

    def memory(self, slots: int) -> int:
        """Return the memory budget that leaves so many cache slots."""
        return max(self.fixed_bytes + slots * self.slot_bytes, self.least_memory)

    def slots(self, memory: int) -> int:
        """Return the cache slots within a memory budget, with a short context.

        BudgetError, with the least budget, where a full context would not fit.
        """
        if memory < self.least_memory:
            raise BudgetError(
                f"{self.name} does not fit into {show_bytes(memory)}: dense parts"
                f" {show_bytes(self.dense_bytes)}, process and workspace"
                f" {show_bytes(self.overhead_bytes)}, a KV cache and activations of {self.context}"
                f" tokens {show_bytes(self.kv_bytes + self.full_bytes)} and"
                f" {self.least_slots} experts need {show_bytes(self.least_memory)}; --memory"
                f" {-(-self.least_memory // (1 << 20))}MiB would do"
            )
        return min((memory - self.fixed_bytes) // self.slot_bytes, self.experts)

    def slots_when_full(self, memory: int) -> int:
        """Return the cache slots within a memory budget, with a full context."""
        return min((memory - self.fixed_bytes - self.full_bytes) // self.slot_bytes, self.experts)
