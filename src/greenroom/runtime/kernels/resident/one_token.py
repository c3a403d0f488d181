"""One token's experts from the router's choice to their sum, where all of them are in their slots.

The bodies of the fused kernel, told of everything by one array that is copied from a template:
after a group has gone through the caches, Python's lists and NumPy's views take as long as the sum
over the experts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from greenroom.runtime.kernels.codegen.entries import choice, expert_group, gating, layers
from greenroom.runtime.kernels.cpu import CpuKernel, CpuStep, layer_plan
from greenroom.runtime.kernels.launch.openmp import BARRIER, kernel_entry
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.resident_tables import SlotTables

# Driver.resident_steps for one layer; the callable computes it and returns its expert counts.
Ask = Callable[[Callable[[SlotTables], tuple[int, ...]]], int | None]


class OneTokenExperts:
    """A layer's experts for one token that chooses `top_k`, with weights of one type."""

    def __init__(
        self, kernel: CpuKernel, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> None:
        plan, hidden = layer_plan(layer, kernel.rounded), layer.hidden
        self._kernel, self._plan = kernel, plan
        self._dtype, self._hidden, self._top_k = layer.dtype, hidden, top_k
        self._weights = layer.dtype if weights is layer.dtype else torch.float32
        # The words of all bodies, made by the kernel for a token that chooses the first experts.
        routing = Routing.of(np.arange(top_k)[None], layer.num_experts)
        x = torch.zeros(1, hidden, dtype=layer.dtype)
        step = CpuStep(kernel, layer, x, routing, torch.zeros(1, top_k, dtype=weights))
        group = step.group_arguments(plan, range(top_k), [0] * top_k)
        combine = step.sum_arguments(plan)[0]
        start = step.addresses[1]
        self._mid, self._act, self._out = (step.addresses[n] - start for n in (1, 2, 3))
        self._sums, self._floats = 4 * step.sums, step.buffer.numel()
        slots = expert_group.GROUP_ARGUMENTS
        self._starts = len(group)
        tokens = self._starts + top_k + 1
        rows = tokens + top_k
        self._combine = rows + top_k
        self._join = self._combine + len(combine)
        self._turns = self._join + layers.NORM_ARGUMENTS
        self._place = self._turns + layers.FIRST_STAGE + 6
        join = [0] * layers.NORM_ARGUMENTS
        join[layers.N_COLUMNS] = hidden
        entries = (
            plan.group_entry.address,
            0,
            plan.combine_entry.address,
            0,
            plan.norm_entry.address,
            0,
        )
        place = [0] * choice.FIND_SLOTS_ARGUMENTS
        place[choice.TOP_K], place[choice.NUMBER] = top_k, layer.num_experts
        self._template = array("q", [
            *group, *range(top_k + 1), *[0] * (2 * top_k), *combine, *join, 3, BARRIER, *entries,
            *place,
        ])  # fmt: skip
        # Words that hold addresses of other words, and of which.
        turns = self._turns + layers.FIRST_STAGE
        self._inner = (
            (expert_group.ROUTED_EXPERTS, slots + top_k), (expert_group.STARTS, self._starts),
            (expert_group.TOKENS, tokens), (expert_group.ROWINDEX, rows),
            (self._combine + expert_group.C_EXPERTS, slots + top_k),
            (self._combine + expert_group.C_STARTS, self._starts),
            (self._combine + expert_group.C_TOKENS, tokens),
            (self._combine + expert_group.C_ROWS, rows),
            (turns + 1, 0), (turns + 3, self._combine), (turns + 5, self._join),
            (self._place + choice.P_EXPERTS, slots + top_k), (self._place + choice.P_SLOTS, slots),
            (self._place + choice.P_RANKS, rows),
        )  # fmt: skip
        self._in_turn = kernel_entry(layers.run_stages, torch.float32)
        self._find = kernel_entry(choice.find_slots, torch.float32)

    @staticmethod
    def of(
        kernel: object, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> OneTokenExperts | None:
        """One for a layer that the fused kernel computes without Python in between, or None."""
        if (
            not isinstance(kernel, CpuKernel)
            or not kernel.supports(layer)
            or layer.norm is not None
        ):
            return None
        raw = layer_plan(layer, kernel.rounded).activation.code == gating.RAW
        if raw or top_k > layer.num_experts:
            return None
        return OneTokenExperts(kernel, layer, top_k, weights)

    def __call__(
        self, ask: Ask, x: Tensor, index: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor | None:
        """residual + the experts' result, all [1, H]; None where `ask` could not answer at once."""
        if (
            index.dtype is not torch.int64
            or index.numel() != self._top_k
            or x.dtype is not self._dtype
            or residual.dtype is not self._dtype
            or not (x.is_contiguous() and index.is_contiguous() and residual.is_contiguous())
        ):
            return None
        if weights.dtype is not self._weights or not weights.is_contiguous():
            weights = weights.to(self._weights).contiguous()
        buffer = self.room()
        result, place = torch.empty_like(x), self._place
        words, base = self._words(
            x.data_ptr(), weights.data_ptr(), residual.data_ptr(), result.data_ptr(), buffer
        )

        def region(tables: SlotTables) -> tuple[int, ...]:
            words[place + choice.IDS] = index.data_ptr()
            words[place + choice.FIRST_PIECE : place + choice.STEP + 1] = tables
            self._find(base + 8 * place, False)
            if not (found := words[place + choice.EXPERT_COUNT]):
                return ()
            self._in_turn(base + 8 * self._turns)
            return (found,)

        return result if ask(region) else None

    def room(self) -> Tensor:
        """Memory for a call."""
        return torch.empty(self._floats)

    def _words(
        self, x: int, weights: int, residual: int, out: int, buffer: Tensor
    ) -> tuple[array[int], int]:
        """(the words of all bodies, where they lie)."""
        words = array("q", self._template)
        base, start = words.buffer_info()[0], buffer.data_ptr()
        for where, of in self._inner:
            words[where] = base + 8 * of
        words[expert_group.X] = x
        words[expert_group.MID], words[expert_group.ACT] = start + self._mid, start + self._act
        words[expert_group.OUT] = words[self._combine + expert_group.C_OUT] = start + self._out
        words[expert_group.SCRATCH] = self._kernel.scratch(self._plan.scratch)[0]
        words[self._combine + expert_group.C_WEIGHTS] = weights
        words[self._combine + expert_group.SUMS] = start + self._sums
        words[self._join + layers.N_X] = residual
        for where in self.outputs:
            words[where] = out
        return words, base

    def takes(self, weights: torch.dtype) -> bool:
        """Are weights of this type used as they are?"""
        return weights is self._weights

    @property
    def stride(self) -> int:
        """Bytes of `scratch` that a thread needs."""
        return self._plan.scratch

    def scratch(self, stride: int) -> int:
        """The address of memory that this thread's calls share; it moves when more is asked for."""
        return self._kernel.scratch(stride)[0]

    def planned(
        self, x: int, index: int, weights: int, residual: int, buffer: Tensor, first: int
    ) -> Planned:
        """The same with ids and weights yet to come, as entries of `in_turn`; nothing is computed
        where an expert is not there. `first` is the layer's first piece; where the result goes and
        the other tables are set in the words."""
        words, base = self._words(x, weights, residual, 0, buffer)
        place, turns = self._place, self._turns + layers.FIRST_STAGE
        words[place + choice.IDS], words[place + choice.FIRST_PIECE] = index, first
        found = base + 8 * (place + choice.EXPERT_COUNT)
        entries = self._find.address, base + 8 * place, 0, found, *words[turns : turns + 6]
        return Planned(words, entries, place + choice.EXPERT_COUNT)

    @property
    def tables(self) -> int:
        """Where in these words the tables begin."""
        return self._place + choice.FIRST_PIECE

    @property
    def outputs(self) -> tuple[int, ...]:
        """Where in these words the result's address is."""
        return (
            self._combine + expert_group.RESULT,
            self._join + layers.N_Y,
            self._join + layers.N_SUM,
        )


class Planned(NamedTuple):
    """A layer's experts in a region of several layers: words that must live until it is over,
    entries of `in_turn`, and at which word it then says how many experts there were."""

    words: array[int]
    entries: tuple[int, ...]
    found: int
