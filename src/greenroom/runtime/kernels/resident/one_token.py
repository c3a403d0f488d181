"""Compute one token's experts, from the router's choice to their sum, if all are resident.

The compiled kernels run with one array of arguments, copied from a template. After a group of
experts has evicted the CPU caches, Python's lists and NumPy's views take as long as the sum over
the experts.
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
RunResident = Callable[[Callable[[SlotTables], tuple[int, ...]]], int | None]


class OneTokenExperts:
    """One MoE layer's experts for a single token, with precomputed kernel arguments.

    The token chooses `top_k` experts, with gate weights of one data type.
    """

    def __init__(
        self, kernel: CpuKernel, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> None:
        plan, hidden = layer_plan(layer, kernel.rounded), layer.hidden
        self._kernel, self._plan = kernel, plan
        self._dtype, self._hidden, self._top_k = layer.dtype, hidden, top_k
        self._weights = layer.dtype if weights is layer.dtype else torch.float32
        # Arguments of all entries, made by the kernel for a token that chooses the first experts.
        routing = Routing.of(np.arange(top_k)[None], layer.num_experts)
        x = torch.zeros(1, hidden, dtype=layer.dtype)
        step = CpuStep(kernel, layer, x, routing, torch.zeros(1, top_k, dtype=weights))
        group_arguments = step.group_arguments(plan, range(top_k), [0] * top_k)
        sum_arguments = step.sum_arguments(plan)[0]
        start = step.addresses[1]
        self._mid, self._act, self._out = (step.addresses[n] - start for n in (1, 2, 3))
        self._sums, self._floats = 4 * step.sums, step.buffer.numel()
        slots = expert_group.GROUP_ARGUMENTS
        self._starts = len(group_arguments)
        tokens = self._starts + top_k + 1
        rows = tokens + top_k
        self._combine = rows + top_k
        self._norm = self._combine + len(sum_arguments)
        self._stages = self._norm + layers.NORM_ARGUMENTS
        self._find_slots = self._stages + layers.FIRST_STAGE + 6
        norm_arguments = [0] * layers.NORM_ARGUMENTS
        norm_arguments[layers.N_COLUMNS] = hidden
        entries = (
            plan.group_entry.address,
            0,
            plan.combine_entry.address,
            0,
            plan.norm_entry.address,
            0,
        )
        find_slots_arguments = [0] * choice.FIND_SLOTS_ARGUMENTS
        find_slots_arguments[choice.TOP_K], find_slots_arguments[choice.NUMBER] = (
            top_k,
            layer.num_experts,
        )
        self._template = array("q", [
            *group_arguments, *range(top_k + 1), *[0] * (2 * top_k), *sum_arguments,
            *norm_arguments, 3, BARRIER, 0, *entries, *find_slots_arguments,
        ])  # fmt: skip
        # (index of an argument that is the address of another one, index of that one)
        stages = self._stages + layers.FIRST_STAGE
        self._internal_addresses = (
            (expert_group.ROUTED_EXPERTS, slots + top_k), (expert_group.STARTS, self._starts),
            (expert_group.TOKENS, tokens), (expert_group.ROWINDEX, rows),
            (self._combine + expert_group.C_EXPERTS, slots + top_k),
            (self._combine + expert_group.C_STARTS, self._starts),
            (self._combine + expert_group.C_TOKENS, tokens),
            (self._combine + expert_group.C_ROWS, rows),
            (stages - 1, stages),
            (stages + 1, 0), (stages + 3, self._combine), (stages + 5, self._norm),
            (self._find_slots + choice.P_EXPERTS, slots + top_k),
            (self._find_slots + choice.P_SLOTS, slots),
            (self._find_slots + choice.P_RANKS, rows),
        )  # fmt: skip
        self._run_stages = kernel_entry("run_stages")
        self._find_slots_entry = kernel_entry("find_slots")

    @staticmethod
    def of(
        kernel: object, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> OneTokenExperts | None:
        """Make the `OneTokenExperts` of an MoE layer.

        Return None if no compiled kernel computes the layer with its activation.
        """
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
        self, run_resident: RunResident, x: Tensor, index: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor | None:
        """Compute one token's experts, and return their sum plus the residual: [1, H].

        run_resident: calls a function with the layer's slot tables if all experts are resident;
                      returns 1 if the function found the slots of the chosen experts, else 0 or
                      None
        x, residual: [1, H]
        index, weights: the chosen expert ids and their gate weights [1, top_k]

        Return None if the inputs have another type or size, or if no expert was computed.
        """
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
        buffer = self.workspace()
        result, find_slots = torch.empty_like(x), self._find_slots
        arguments, base = self._fill_arguments(
            x.data_ptr(), weights.data_ptr(), residual.data_ptr(), result.data_ptr(), buffer
        )

        def region(tables: SlotTables) -> tuple[int, ...]:
            arguments[find_slots + choice.IDS] = index.data_ptr()
            arguments[find_slots + choice.FIRST_PIECE : find_slots + choice.STEP + 1] = array(
                "q", tables
            )
            self._find_slots_entry(base + 8 * find_slots, False)
            if not (count := arguments[find_slots + choice.EXPERT_COUNT]):
                return ()
            self._run_stages(base + 8 * self._stages)
            return (count,)

        return result if run_resident(region) else None

    def workspace(self) -> Tensor:
        """Allocate the scratch memory of one kernel call for one token's experts."""
        return torch.empty(self._floats)

    def _fill_arguments(
        self, x: int, weights: int, residual: int, out: int, buffer: Tensor
    ) -> tuple[array[int], int]:
        """Return (arguments of all entries, their address)."""
        arguments = array("q", self._template)
        base, start = arguments.buffer_info()[0], buffer.data_ptr()
        for where, target in self._internal_addresses:
            arguments[where] = base + 8 * target
        arguments[expert_group.X] = x
        arguments[expert_group.MID], arguments[expert_group.ACT] = (
            start + self._mid,
            start + self._act,
        )
        arguments[expert_group.OUT] = arguments[self._combine + expert_group.C_OUT] = (
            start + self._out
        )
        arguments[expert_group.SCRATCH] = self._kernel.scratch(self._plan.scratch)[0]
        arguments[self._combine + expert_group.C_WEIGHTS] = weights
        arguments[self._combine + expert_group.SUMS] = start + self._sums
        arguments[self._norm + layers.N_X] = residual
        for where in self.output_indices:
            arguments[where] = out
        return arguments, base

    def accepts(self, weights: torch.dtype) -> bool:
        """Check that gate weights of a data type are used without conversion."""
        return weights is self._weights

    @property
    def stride(self) -> int:
        """Return how many bytes of scratch memory experts need per thread."""
        return self._plan.scratch

    def scratch(self, stride: int) -> int:
        """Return the address of the calling thread's scratch memory for experts.

        Each of torch's OpenMP threads uses `stride` bytes of it. The memory moves when it grows.
        """
        return self._kernel.scratch(stride)[0]

    def region_arguments(
        self, x: int, index: int, weights: int, residual: int, buffer: Tensor, first: int
    ) -> RegionArguments:
        """Make kernel arguments of an MoE layer's experts for a region of several layers.

        x, index, weights, residual: addresses, whose values are computed in the region
        buffer: memory from `workspace`
        first: index of the layer's first expert in the tables of slots

        The output's address and the slot tables must be set afterwards. The kernels compute nothing
        if a chosen expert is not loaded.
        """
        arguments, base = self._fill_arguments(x, weights, residual, 0, buffer)
        find_slots, stages = self._find_slots, self._stages + layers.FIRST_STAGE
        arguments[find_slots + choice.IDS], arguments[find_slots + choice.FIRST_PIECE] = (
            index,
            first,
        )
        count = base + 8 * (find_slots + choice.EXPERT_COUNT)
        entries = (
            self._find_slots_entry.address,
            base + 8 * find_slots,
            0,
            count,
            *arguments[stages : stages + 6],
        )
        return RegionArguments(arguments, entries, find_slots + choice.EXPERT_COUNT)

    @property
    def tables_index(self) -> int:
        """Return the index in the kernel arguments at which the expert slot tables begin."""
        return self._find_slots + choice.FIRST_PIECE

    @property
    def output_indices(self) -> tuple[int, ...]:
        """Return the indices of the output's address in the kernel arguments."""
        return (
            self._combine + expert_group.RESULT,
            self._norm + layers.N_Y,
            self._norm + layers.N_SUM,
        )


class RegionArguments(NamedTuple):
    """Kernel arguments of an MoE layer's experts in a region of several layers.

    arguments:   the arguments, which must stay alive until the region has ended
    entries:     addresses of kernels and their arguments, for `run_stages`
    count_index: index of the argument that becomes the number of computed experts
    """

    arguments: array[int]
    entries: tuple[int, ...]
    count_index: int
