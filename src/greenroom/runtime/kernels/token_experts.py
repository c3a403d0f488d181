"""One token's experts on the CPU, group by group, with calls that are built once.

A decode step is one token. Its kernel calls differ from the last token's in a few addresses and in
the lists of experts and slots.
"""

from __future__ import annotations

import threading
from array import array

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.runtime.kernels.cpu import CpuKernel, CpuStep
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.launch.call_block import CallBlock
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing

_GROUP, _SUM, _NORM = range(3)  # kernel calls


class TokenExperts:
    """One MoE layer's experts for a single token in one thread, as expert groups arrive.

    The token chooses `top_k` experts, with gate weights of one data type. `begin` starts a step;
    `compute_group` computes its groups, the last one with the sum over experts, the `result`.

    experts: ids of the step's experts, ascending
    """

    def __init__(
        self, kernel: CpuKernel, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> None:
        plan = self._plan = layer_plan(layer, kernel.name)
        self._kernel, self._layer, self._top_k = kernel, layer, top_k
        self._weights_dtype = layer.dtype if weights is layer.dtype else torch.float32
        first = self._first = Routing.of(np.arange(top_k)[None], layer.num_experts)
        x = torch.zeros(1, layer.hidden, dtype=layer.dtype)
        step = CpuStep(kernel, layer, x, first, torch.zeros(1, top_k, dtype=self._weights_dtype))
        stages = (
            (plan.group_entry, step.group_call(plan, range(top_k), [0] * top_k)[0]),
            (plan.sum_entry, step.sum_call(plan)[0]),
            (plan.norm_entry, plan.norm_type.from_buffer_copy(plan.norm_template)),
        )
        self._block, self._routing_call = CallBlock(stages), step.routing_call
        # The choice as kernels read it: experts first, their ranks last.
        self._choice: NDArray[np.int64] = first.experts.base  # type: ignore[assignment]
        self._floats, self._start = step.buffer.numel(), step.buffer.data_ptr()
        self._find_fields()

    def _find_fields(self) -> None:
        """Find the arguments that change from step to step, and from group to group."""
        index = self._block.index
        self._x, self._count = index(_GROUP, "x"), index(_GROUP, "count")
        self._scratch = index(_GROUP, "scratch")
        self._sequential_rows = index(_GROUP, "sequential_rows")
        self._lists = [index(_GROUP, name) for name in ("experts", "slots", "finished")]
        self._weights, self._residual = index(_SUM, "weights"), index(_NORM, "x")
        self._results = index(_SUM, "result"), index(_NORM, "y"), index(_NORM, "sum")
        self._in_buffer = [index(_GROUP, name) for name in ("mid", "act", "out")]
        self._in_buffer += [index(_SUM, name) for name in ("outputs", "sums")]

    @staticmethod
    def of(
        kernel: object, layer: LayerExperts, top_k: int, weights: torch.dtype
    ) -> TokenExperts | None:
        """Make the calls for an MoE layer; None if kernels cannot sum in a group's region."""
        if type(kernel) is not CpuKernel or not kernel.supports(layer):
            return None
        if top_k > layer.num_experts or not layer_plan(layer, kernel.name).sums_in_region:
            return None
        return TokenExperts(kernel, layer, top_k, weights)

    def begin(
        self, chosen: NDArray[np.int64], x: Tensor, weights: Tensor, residual: Tensor | None
    ) -> bool:
        """Begin a step for one token; return False if its inputs are of another kind.

        chosen, weights: ids of the chosen experts, and their gate weights, [1, top_k]
        x: [1, H]
        residual: H items of any shape, which is the result's; it is added to the result
        """
        dtype, k = self._layer.dtype, self._top_k
        if x.dtype is not dtype or chosen.shape != (1, k) or not x.is_contiguous():
            return False
        (ids,) = chosen.tolist()
        ranks = sorted(range(k), key=ids.__getitem__)
        experts = [ids[rank] for rank in ranks]
        if experts[-1] >= self._layer.num_experts or len({*experts}) < k:
            return False
        if residual is not None and not (residual.dtype is dtype and residual.is_contiguous()):
            return False
        if weights.dtype is not self._weights_dtype or not weights.is_contiguous():
            weights = weights.to(self._weights_dtype).contiguous()
        self.result = torch.empty_like(x if residual is None else residual)
        self._inputs = x, weights, residual  # kept alive: kernels read them until the last group
        self.experts = self._choice[:k] = np.array(experts, np.int64)
        self._choice[-k:] = ranks
        self.left, first = k, self._block.first
        if (start := self._kernel.buffer(self._floats)) != self._start:
            for index in self._in_buffer:
                first[index] += start - self._start
            self._start = start
        first[self._x], first[self._weights] = x.data_ptr(), weights.data_ptr()
        first[self._scratch] = self._kernel.scratch(self._plan.scratch)[0]
        first[self._sequential_rows] = self._kernel.sequential_rows
        out = self.result.data_ptr()
        for index in self._results:
            first[index] = out
        self._stages = 2
        if residual is not None:
            first[self._residual], self._stages = residual.data_ptr(), 3
        return True

    def compute_group(self, experts: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Compute a group of a step's experts from their slots; the last group is summed."""
        count = experts.size
        self.left -= count
        lists = array("q", [*experts.tolist(), *slots.tolist(), *[0] * count])
        address, arguments = lists.buffer_info()[0], self._block.reset()
        arguments[self._count] = count
        for index in self._lists:
            arguments[index] = address
            address += 8 * count
        self._block.launch(1 if self.left else self._stages)


class ThreadTokenExperts(threading.local):
    """Each thread's `TokenExperts` of one MoE layer, by top_k and the weights' data type."""

    def __init__(self, kernel: object, layer: LayerExperts) -> None:
        self._kernel, self._layer = kernel, layer
        self._by_key: dict[tuple[int, torch.dtype], TokenExperts | None] = {}

    def of(self, top_k: int, weights: torch.dtype) -> TokenExperts | None:
        """Return the calling thread's calls, made at their first use; None if there are none."""
        key = top_k, weights
        if key not in self._by_key:
            self._by_key[key] = TokenExperts.of(self._kernel, self._layer, *key)
        return self._by_key[key]
