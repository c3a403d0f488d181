"""What a plan knows of a model: sizes and shape, no weights. Bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.pieces import Ints
from greenroom.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Model:
    """A model, as its config and headers say.

    expert_bytes: what is moved for one expert (a mean where layers differ)
    slot_bytes:   what an expert takes in memory
    dense_bytes:  all that stays in memory
    read_bytes:   what of it one token reads: all but the input embedding, unless the head is tied
    overhead_bytes: Python, libraries, compiled kernels, activations, staging
    kv_bytes:     keys and values of the first block of a prompt
    full_bytes:   what keys, values and activations of `context` tokens take more than these; slots
                  make room for it as the context grows
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
    low: float = 0.0  # bytes of a low-precision copy, as a share of the expert's; 0: there are none
    nested: bool = False  # whether copies are a part of their experts
    segments: bool = False  # whether its experts are packed so that they can be split

    @property
    def layers(self) -> int:
        return len(self.experts_per_layer)

    @property
    def experts(self) -> int:
        return sum(self.experts_per_layer)

    @property
    def offsets(self) -> Ints:
        """[layers + 1]"""
        return np.array([0, *accumulate(self.experts_per_layer)], np.int64)

    @property
    def fixed_bytes(self) -> int:
        """Bytes beside the experts' slots, with a short context."""
        return self.dense_bytes + self.overhead_bytes + self.kv_bytes

    @property
    def least_slots(self) -> int:
        """Slots without which nothing can be computed: the experts of one token in one layer."""
        return min(self.top_k, self.experts)

    @property
    def least_memory(self) -> int:
        """With a full context."""
        return self.fixed_bytes + self.full_bytes + self.least_slots * self.slot_bytes

    def memory(self, slots: int) -> int:
        """The budget that leaves so many slots."""
        return max(self.fixed_bytes + slots * self.slot_bytes, self.least_memory)

    def slots(self, memory: int) -> int:
        """What a budget leaves with a short context; BudgetError says what would do for a full
        one."""
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
        """What it leaves when the context is full."""
        return min((memory - self.fixed_bytes - self.full_bytes) // self.slot_bytes, self.experts)
