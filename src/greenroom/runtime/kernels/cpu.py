"""The default expert kernel on a CPU: one compiled call per expert group.

Memory bandwidth limits a call. Weights are read in place from the slots and multiplied: bfloat16
by pairs, other floats after conversion to float32 in registers. Values are rounded where
transformers' eager experts round them. Encoded (quantised) weights are decoded in registers too, to
the values of their format (matrix.py).

An element of the result depends only on its token, the token's experts and their weights, not on
the group, the slot, the batch or the number of threads. Encodings without integer products are an
exception: if an expert has few tokens, they are multiplied one by one. So the bits depend on the
batch, unless `batch_invariant` is active. The down projection is summed in blocks of 64
intermediate channels, or of 32 as integers. So an expert can be cut between blocks into segments
that are computed one after another, without changing a bit.

The eager kernel computes layers without a compiled product (`LayerExperts.fallback_reason`), and by
default float32 models. Compiled float32 code would differ from eager in the order of summation; so
transformers' `grouped_mm`, which calls eager's matrix product, would be nearer to eager.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.kernels import base, eager
from greenroom.runtime.kernels.activation import RAW
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.cpu_layer import CpuLayerPlan, layer_plan
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.routing import Routing

_ALL = 1 << 62
FEW = 4  # tokens up to which one by one is faster than expanding encoded weights once
_SERIAL = 1 << 16  # a sum over experts of so many elements is not worth a second thread


class CpuStep(base.KernelStep):
    """One MoE layer's computation for some tokens by the compiled CPU kernel.

    `buffer` holds float32 matrices, one after another: up projections [S, 2 I] ([S, I] without a
    gate), activations [S, I], an expert output per choice [T * top_k, H] from element `out` on, and
    sums [T, H] from element `sums` on. S is the number of (token, rank) entries that experts
    compute.
    """

    __slots__ = (
        *("addresses", "buffer", "input", "kernel", "left", "narrow", "out", "packed", "plan"),
        *("pairs", "result", "routing_call", "sums", "wide"),
    )
    supports_segments = True

    def __init__(
        self, kernel: CpuKernel, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> None:
        super().__init__(layer, x, routing, weights)
        self.kernel, self.plan = kernel, layer_plan(layer, kernel.name)
        self.result: Tensor | None = None  # set if it was computed with the last group
        self.left = len(routing.experts)  # without those that `compute_group` has computed
        # One token is not converted here: torch's conversion takes longer than the kernel's own.
        # Pairs of bfloat16 are multiplied without conversion.
        self.pairs = x.dtype is layer.dtype is torch.bfloat16
        narrow = x.dtype is layer.dtype and (len(x) == 1 or self.plan.multiplies_pairs)
        self.narrow = narrow
        wide = (x if narrow else x.float()).contiguous()
        self.input = wide  # kept alive: kernel entries read it until the last group
        self.wide: Tensor | None = None if narrow else wide
        self.packed: dict[int, Tensor] = {}  # the input packed as integers, by planes
        (tokens, top_k), entries, count = routing.shape, len(routing.rows), len(routing.experts)
        act = entries * layer.width
        self.out = act + entries * layer.inner
        self.sums = self.out + tokens * top_k * layer.hidden
        self.buffer = torch.empty(self.sums + tokens * layer.hidden)
        experts, start = routing.address, self.buffer.data_ptr()
        at = experts + 8 * (2 * count + 1)
        self.routing_call = self.plan.routing_type(
            count, experts, experts + 8 * count, at, at + 16 * entries
        )
        self.addresses = wide.data_ptr(), start, start + 4 * act, start + 4 * self.out

    def _buffer_matrix(self, start: int, rows: int, columns: int) -> Tensor:
        """Return a part of the step's float32 buffer as a matrix."""
        return self.buffer[start : start + rows * columns].view(rows, columns)

    @property
    def outputs(self) -> Tensor:
        """Return the expert outputs of a step as float32 [T * top_k, H].

        Row t * top_k + r is the output for token t's choice of rank r, before gate weights.
        """
        tokens, top_k = self.routing.shape
        return self._buffer_matrix(self.out, tokens * top_k, self.layer.hidden)

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        plan, count = self.plan, len(experts)
        self.left -= count
        one = self.narrow and len(self.x) == 1
        if count and not self.left and one and plan.sums_in_region:
            self._compute_last_group(plan, experts, slots)
        else:
            self._compute(plan, self.layer, experts, slots, False)

    def leave_sum(self) -> None:
        self.left = -1  # no group is the last one

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        accumulate: bool = False,
    ) -> None:
        """Compute experts from the slots of another `LayerExperts`, without summing outputs.

        If the slots hold a segment of each expert, the segment must have a multiple of 64 channels
        of the intermediate dimension.
        """
        plan = layer_plan(layer, self.kernel.name)
        self._compute(plan, layer, experts, slots, accumulate)

    def _compute(
        self,
        plan: CpuLayerPlan,
        layer: LayerExperts,
        experts: Sequence[int],
        slots: Sequence[int],
        accumulate: bool,
    ) -> None:
        run = plan.group_entry
        if plan.activation.code != RAW:
            call, _lists = self.group_call(plan, experts, slots, accumulate)
            run(ctypes.addressof(call))
            return
        call, _lists = self.group_call(plan, experts, slots, accumulate, down=False)
        run(ctypes.addressof(call))
        self._activate(plan, layer, experts)
        call, _lists = self.group_call(plan, experts, slots, accumulate, up=False)
        run(ctypes.addressof(call))

    def combine(self) -> Tensor:
        return super().combine() if self.result is None else self.result

    def total(self) -> Tensor:
        if self.layer.norm is not None:
            self._norm(self.layer.norm)
        call, result, _weights = self.sum_call(self.plan)
        wide = len(self.routing.rows) * self.layer.hidden > _SERIAL
        self.plan.sum_entry(ctypes.addressof(call), wide)
        return result

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        target, source = self.outputs, other.outputs
        for expert in experts:
            rows = torch.from_numpy(self.routing.rows[self.routing.entries(expert)])
            target[rows] = source[rows]

    def host_kernel(self, layer: LayerExperts) -> CpuKernel:
        return self.kernel

    def outputs_of(self, experts: Sequence[int]) -> Tensor:
        layer, routing, out, ids = self.layer, self.routing, self.outputs, list(experts)
        rows = routing.rows.tolist()
        if rows == [*range(len(ids))] and ids == routing.experts.tolist():  # all, in their order
            out = out[: len(ids)]  # the token may have chosen experts of other processes
        else:
            entries = routing.entries_of(experts)
            out = out[[rows[n] for each in entries for n in each]]
            ids = [e for e, each in zip(experts, entries, strict=True) for _ in each]
        h = out.to(layer.recipe.compute or layer.dtype)
        return h if layer.down_bias is None else h + layer.down_bias[ids].to(h.dtype)

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Leave the given experts, which are not computed, out of the weighted sum.

        Their outputs and gate weights become 0. `combine` still adds their biases to the outputs,
        and multiplies both by the gate weight 0.
        """
        self.weights = self.weights.clone()
        for expert in experts:
            at = torch.from_numpy(self.routing.rows[self.routing.entries(expert)])
            self.outputs[at] = 0
            self.weights.view(-1)[at] = 0

    def _compute_last_group(
        self, plan: CpuLayerPlan, experts: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Compute one token's last group, the sum over its experts and the residual sum."""
        group, _lists = self.group_call(plan, experts, slots)
        total, result, _weights = self.sum_call(plan)
        address, residual = ctypes.addressof, self.residual
        stages = [plan.group_entry.address, address(group), plan.sum_entry.address, address(total)]
        if residual is not None:
            norm = plan.norm_type.from_buffer_copy(plan.norm_template)
            norm.x, norm.y = residual.data_ptr(), result.data_ptr()
            norm.sum = norm.y
            stages += plan.norm_entry.address, address(norm)
        sequence.launch(array("q", stages), len(stages) // 2)
        self.result = result

    def sum_call(self, plan: CpuLayerPlan) -> tuple[Any, Tensor, Tensor]:
        """Make the call that sums a step's expert outputs for each token.

        Return (call of the kernel `sum_experts`, the tensor [T, H] for its result, the gate
        weights, which must stay alive until the call has ended).
        """
        layer, x, weights = self.layer, self.x, self.weights
        tokens, hidden = self.routing.shape[0], layer.hidden
        round_product, round_sum = plan.sum_rounding(x, weights)
        narrow = weights.dtype is layer.dtype and weights.is_contiguous()
        if not narrow:
            weights = weights.float().contiguous()
        result = torch.empty(tokens, hidden, dtype=x.dtype)
        out = self.addresses[3]
        call = plan.sum_type.from_buffer_copy(plan.sum_template)
        call.routing, call.tokens = ctypes.addressof(self.routing_call), tokens
        call.outputs, call.sums = out, out + 4 * (self.sums - self.out)
        call.weights, call.narrow = weights.data_ptr(), narrow
        call.round_product, call.round_sum = round_product, round_sum
        call.result = result.data_ptr()
        return call, result, weights

    def group_call(
        self,
        plan: CpuLayerPlan,
        experts: Sequence[int],
        slots: Sequence[int],
        accumulate: bool = False,
        up: bool = True,
        down: bool = True,
    ) -> tuple[Any, array[int]]:
        """Make a call of the kernel `compute_group` for some experts of a step.

        accumulate: add to outputs that earlier segments of the experts have written
        up, down: compute the up projection, the down projection

        Return (call, the lists of experts and slots, which must stay alive until it has ended).
        """
        count = len(experts)
        lists = array("q", [*experts, *slots, *[0] * count])
        first = lists.buffer_info()[0]
        scratch, scratch_bytes = self.kernel.scratch(plan.scratch)
        x, mid, act, out = self.addresses
        call = plan.group_type.from_buffer_copy(plan.group_template)
        narrow = self.narrow and (len(self.x) == 1 or plan.multiplies_pairs)
        if self.narrow and not narrow:  # low-precision copies of experts whose matrices take rows
            x = self._wide_input().data_ptr()
        call.routing, call.narrow = ctypes.addressof(self.routing_call), narrow
        call.pairs = self.pairs
        call.up, call.down, call.accumulate = up, down, accumulate
        call.sequential_rows = self.kernel.sequential_rows
        call.x, call.mid, call.act, call.out = x, mid, act, out
        if up and plan.up_planes and not narrow:
            call.packed = self._packed(plan.up_planes)
        call.scratch, call.scratch_bytes, call.count = scratch, scratch_bytes, count
        call.experts, call.slots, call.finished = first, first + 8 * count, first + 16 * count
        return call, lists

    def _packed(self, planes: int) -> int:
        """Return the address of the input packed as integers; threads pack one token themselves."""
        if planes not in self.packed:
            wide = self._wide_input()
            self.packed[planes] = torch.empty_like(wide)
            pack_rows(wide, self.packed[planes], planes)
        return self.packed[planes].data_ptr()

    def _wide_input(self) -> Tensor:
        """Return the input in float32; it is kept as long as kernels may read it."""
        if self.wide is None:
            self.wide = self.input.float()
        return self.wide

    def _activate(self, plan: CpuLayerPlan, layer: LayerExperts, experts: Sequence[int]) -> None:
        """Apply the module's own activation, expert by expert, as eager does."""
        dtype = layer.recipe.compute or layer.dtype
        start = len(self.routing.rows) * self.layer.width
        for expert in experts:
            rows = self.routing.entries(expert)
            at, count = rows.start, rows.stop - rows.start
            h = self._buffer_matrix(at * layer.width, count, layer.width)
            act = self._buffer_matrix(start + at * layer.inner, count, layer.inner)
            act.copy_(layer.activate(h.to(dtype)))
            if plan.down_planes:
                pack_rows(act, act, plan.down_planes)

    def _norm(self, norm: Callable[[Tensor], Tensor]) -> None:
        """Round the outputs, add biases and apply the post-expert norm, in place."""
        layer, routing = self.layer, self.routing
        rows = torch.from_numpy(routing.rows)
        out = self.outputs
        h = out[rows].to(layer.recipe.compute or layer.dtype)
        if layer.down_bias is not None:
            experts = torch.from_numpy(routing.experts)
            counts = torch.from_numpy(routing.starts).diff()
            h = h + layer.down_bias[experts.repeat_interleave(counts)].to(h.dtype)
        out[rows] = norm(h).float()


def pack_rows(x: Tensor, out: Tensor, planes: int) -> None:
    """Pack rows of float32 inputs [rows, columns] as integers, into `out` of the same size."""
    rows, columns = x.shape
    call = library().structure("PackCall")(
        planes=planes, rows=rows, columns=columns, x=x.data_ptr(), out=out.data_ptr()
    )
    kernel_entry("pack_rows")(ctypes.addressof(call), rows * columns > _SERIAL)


class CpuKernel(Kernel):
    """The compiled expert kernel on the CPU: `kernels="native"`, `"precise"` or `"rounded"`."""

    def __init__(self, name: str = "native", float32: bool = False) -> None:
        """Make a compiled CPU kernel for experts.

        name: native; precise, with inputs of 15 bits also for types of GGUF; or rounded, which
              rounds encoded weights to the model's type before use, as transformers does when it
              dequantises a checkpoint: the outputs are then bit for bit those of that checkpoint
        float32: compute float32 models too, not with the eager kernel
        """
        self.name, self._float32 = name, float32
        # Up to so many tokens, an encoded expert's float32 inputs are multiplied one by one.
        self.sequential_rows = FEW
        self._local = threading.local()

    @contextmanager
    def batch_invariant(self) -> Iterator[None]:
        """Return a context in which expert outputs have the same bits in any batch.

        Outside of the context the bits of encodings without integer products depend on the number
        of tokens per expert.
        """
        before, self.sequential_rows = self.sequential_rows, _ALL
        try:
            yield
        finally:
            self.sequential_rows = before

    def supports(self, layer: LayerExperts) -> bool:
        """Check that the compiled CPU kernel, not the eager kernel, computes an MoE layer."""
        return not layer.fallback_reason and (self._float32 or layer.dtype is not torch.float32)

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> CpuStep | eager.EagerStep:
        if not self.supports(layer):
            return eager.EagerStep(layer, x, routing, weights)
        return CpuStep(self, layer, x, routing, weights)

    def scratch(self, stride: int) -> tuple[int, int]:
        """Return the calling thread's scratch memory for compiled expert entries.

        Return (address, `stride`): each of torch's OpenMP threads uses `stride` bytes from the
        address on. The thread's later calls reuse the memory, which moves when it grows.
        """
        return self._memory("buffer", stride * torch.get_num_threads()), stride

    def buffer(self, floats: int) -> int:
        """Return the address of float32 memory for one token's step in the calling thread."""
        return self._memory("token", 4 * floats)

    def _memory(self, name: str, nbytes: int) -> int:
        memory: Tensor | None = getattr(self._local, name, None)
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            setattr(self._local, name, memory)
        return memory.data_ptr()
