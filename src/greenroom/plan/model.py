"""Sizes and shape of an MoE model, as the planner needs them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.pieces import Ints
from greenroom.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes and shape of an MoE model, from its config and safetensors headers.

    expert_bytes:   bytes read to load one expert (a mean if layers differ)
    slot_bytes:     bytes that one expert takes in memory
    dense_bytes:    weights that always stay in memory: all but the experts
    read_bytes:     bytes of these weights that one token reads; the input embedding counts only if
                    it is also the output head
    overhead_bytes: Python, libraries, compiled kernels, activations, buffers for transfers
    kv_bytes:       keys and values of the first block of a prompt
    context:        most tokens of a prompt and its answer
    full_bytes:     further bytes of keys, values and activations with `context` tokens; the cache
                    gives up slots for them as the context grows
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
    low: float = 0.0  # bytes of an expert's low-precision copy / the expert's; 0: no copies
    nested: bool = False  # whether low-precision copies are a part of their experts' bytes
    segments: bool = False  # whether the pack's experts can be split
    token_graph: bool = False  # whether a pass of one token can be one CUDA graph

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def experts(self) -> int:
        return sum(self.experts_per_layer)

    @property
    def offsets(self) -> Ints:
        """Return the ids, counted over all layers, at which layers begin: [layers + 1]."""
        return np.array([0, *accumulate(self.experts_per_layer)], np.int64)

    @property
    def fixed_bytes(self) -> int:
        """Return how many bytes a run with a short context takes besides its expert cache."""
        return self.dense_bytes + self.overhead_bytes + self.kv_bytes

    @property
    def least_slots(self) -> int:
        """Return the fewest cache slots for a run: the experts of one token in one layer."""
        return min(self.top_k, self.experts)

    @property
    def least_memory(self) -> int:
        """Return the smallest memory budget, in bytes, with which the model runs a full context."""
        return self.fixed_bytes + self.full_bytes + self.least_slots * self.slot_bytes

    def memory(self, slots: int) -> int:
        """Return the memory budget, in bytes, for a number of cache slots."""
        return max(self.fixed_bytes + slots * self.slot_bytes, self.least_memory)

    def slots(self, memory: int) -> int:
        """Return the slots of the expert cache within a memory budget, with a short context.

        BudgetError, which names the least budget, if a full context would not fit.
        """
        if memory < self.least_memory:
            raise BudgetError(
                f"{self.name} needs {show_bytes(self.least_memory)}, more than the budget of"
                f" {show_bytes(memory)}: {show_bytes(self.dense_bytes)} for non-expert weights,"
                f" {show_bytes(self.overhead_bytes)} for the process and its buffers,"
                f" {show_bytes(self.kv_bytes + self.full_bytes)} for a KV cache and activations of"
                f" {self.context} tokens and {show_bytes(self.least_slots * self.slot_bytes)} for"
                f" {self.least_slots} experts; give --memory"
                f" {-(-self.least_memory // (1 << 20))}MiB"
            )
        return min((memory - self.fixed_bytes) // self.slot_bytes, self.experts)

    def slots_when_full(self, memory: int) -> int:
        """Return the slots of the expert cache within a memory budget, with a full context."""
        return min((memory - self.fixed_bytes - self.full_bytes) // self.slot_bytes, self.experts)
