"""The default kernel on a CPU: one compiled call a group, at the speed of memory.

Weights are read in place from the slots, widened in registers and multiplied in float32; values
are rounded where eager rounds them. Encoded weights are expanded in registers too, to the values
that their format says (matrix.py). An element of the result depends only on its token, its experts
and their weights: not on the group, the slot, the batch, or the number of threads. (Of encoded
experts it depends on the batch: those with few tokens multiply them one by one, by whole numbers.
`alone` makes all do so.) The down projection is
summed in blocks of 64 of the intermediate dimension, so an expert can be cut at such a boundary
into pieces that are computed one after the other, without changing a bit.

The eager kernel computes a layer that has no compiled product (`LayerExperts.fallback_reason`).
So is a float32 model by default: there the order of summation is the whole distance to eager, and
transformers' `grouped_mm`, which calls the same matrix product as eager, is nearer to it than any
other order can be.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from greenroom.core.layout import PLAIN
from greenroom.runtime.kernels import base, eager
from greenroom.runtime.kernels.activation import Activation, find_activation
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.codegen.entries import expert_group, gating, layers, products
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import KernelEntry, kernel_entry
from greenroom.runtime.kernels.launch.sequence import bits
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.matrix import MatrixProduct
from greenroom.runtime.kernels.routing import Routing

_ALL = 1 << 62
_SERIAL = 1 << 16  # elements below which the sum over experts is not worth a second thread


class CpuLayerPlan:
    """What never changes for a layer: compiled bodies and the constant words of their arguments."""

    __slots__ = (
        *("activation", "combine", "combine_bias", "join", "matrices", "narrow_steps", "rounded"),
        *("scratch", "steps", "tail", "up_bias", "group"),
    )

    def __init__(self, layer: LayerExperts, rounded: bool = False) -> None:
        self.activation: Activation = find_activation(layer)
        self.rounded = rounded
        weights = layer.up_weight, layer.down_weight
        encoded = any(weight.encoding != PLAIN for weight in weights)
        by_columns = layer.transposed and not encoded
        self.group: KernelEntry = kernel_entry(
            expert_group.compute_group, layer.dtype, by_columns, encoded
        )
        self.combine: KernelEntry = kernel_entry(expert_group.combine, layer.dtype)
        self.join: KernelEntry = kernel_entry(layers.add_and_norm, layer.dtype)
        self.matrices = [MatrixProduct(w, layer.dtype, rounded) for w in weights] if encoded else []
        # Bytes a thread: weight rows widened together, or a block of a strip and a panel's sums;
        # three more rows are for what an encoded product needs.
        rows = (products.GROUP + 3) * max(layer.hidden, layer.inner) + 1024
        strip = products.BLOCK * products.STRIP * products.LANES + 1024
        self.scratch = 4 * (max(rows, strip) + -(-layer.hidden // 16) * 16)  # and one token's x
        self.up_bias, self.combine_bias = layer.up_bias, layer.down_bias
        # Channels and columns claimed together: a unit's first rows are waited for, and those of
        # encoded matrices are short. A transposed matrix is read along its long rows where each
        # expert has one token, and in narrow strips for several tokens at once.
        long = min(512, -(-layer.inner // 256) * 128), min(1024, -(-layer.hidden // 256) * 128)
        self.steps = long if by_columns else (64, 128) if encoded else (32, 64)
        self.narrow_steps = (128, 128) if by_columns else (32, 64)
        self.tail = [
            *(layer.slots.address(0), layer.slots.stride, layer.up.offset, layer.down.offset),
            *(layer.hidden, layer.inner, layer.width),
            *(int(layer.interleaved), 0 if self.up_bias is None else self.up_bias.data_ptr()),
            *(self.activation.code, bits(self.activation.limit), bits(self.activation.alpha)),
            int(layer.recipe.compute is None),
            *([word for m in self.matrices for word in m.words] or [0] * 4),
        ]


def layer_plan(layer: LayerExperts, rounded: bool = False) -> CpuLayerPlan:
    """The layer's plan, made at its first use; `rounded` as for `MatrixProduct`."""
    if not isinstance(layer.plan, CpuLayerPlan) or layer.plan.rounded != rounded:
        layer.plan = CpuLayerPlan(layer, rounded)
    return layer.plan


class CpuStep(base.KernelStep):
    """A step under way.

    All float32, one after another in `buffer`: mid [S, 2I], act [S, I], out [T * K, H] and
    sums [T, H], where S is the number of entries of the routing.
    """

    __slots__ = (
        *("buffer", "kept", "kernel", "narrow", "out", "plan", "result", "routing_words"),
        *("sums", "words"),
    )
    supports_segments = True

    def __init__(
        self, kernel: CpuKernel, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> None:
        super().__init__(layer, x, routing, weights)
        self.kernel, self.plan = kernel, layer_plan(layer, kernel.rounded)
        self.result: Tensor | None = None  # where it was computed with the last group
        # One token stays as it is: torch's conversion takes longer than the kernel's own.
        self.narrow = len(x) == 1 and x.dtype is layer.dtype and x.is_contiguous()
        wide = x if self.narrow else x.float().contiguous()
        self.kept = wide  # its memory is in use until the last group
        (tokens, top_k), entries, count = routing.shape, len(routing.rows), len(routing.experts)
        act = entries * layer.width
        self.out = act + entries * layer.inner
        self.sums = self.out + tokens * top_k * layer.hidden
        self.buffer = torch.empty(self.sums + tokens * layer.hidden)
        experts, start = routing.address, self.buffer.data_ptr()
        at = experts + 8 * (2 * count + 1)
        self.routing_words = count, experts, experts + 8 * count, at, at + 16 * entries
        self.words = wide.data_ptr(), start, start + 4 * act, start + 4 * self.out

    def matrix(self, start: int, rows: int, columns: int) -> Tensor:
        """A part of the buffer as a matrix."""
        return self.buffer[start : start + rows * columns].view(rows, columns)

    @property
    def outputs(self) -> Tensor:
        """Of every entry [T * K, H], by token and rank."""
        tokens, top_k = self.routing.shape
        return self.matrix(self.out, tokens * top_k, self.layer.hidden)

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        plan, every = self.plan, len(experts) == len(self.routing.experts)
        compiled = plan.activation.code != gating.RAW and self.layer.norm is None
        if every and compiled and self.narrow:
            self._at_once(plan, self.words_of_group(plan, experts, slots))
        else:
            self._compute(plan, self.layer, experts, slots, False)

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        carry: bool = False,
    ) -> None:
        """As `base.KernelStep.part`; a piece has a multiple of 64 of the intermediate dimension."""
        plan = layer_plan(layer, self.kernel.rounded)
        self._compute(plan, layer, experts, slots, carry)

    def _compute(
        self,
        plan: CpuLayerPlan,
        layer: LayerExperts,
        experts: Sequence[int],
        slots: Sequence[int],
        carry: bool,
    ) -> None:
        if plan.activation.code != gating.RAW:
            words = self.words_of_group(plan, experts, slots, carry)  # must live until it is over
            plan.group(words.buffer_info()[0])
            return
        up = self.words_of_group(plan, experts, slots, carry, down=False)
        plan.group(up.buffer_info()[0])
        self._gate(layer, experts)
        down = self.words_of_group(plan, experts, slots, carry, up=False)
        plan.group(down.buffer_info()[0])

    def combine(self) -> Tensor:
        return super().combine() if self.result is None else self.result

    def total(self) -> Tensor:
        if self.layer.norm is not None:
            self._norm(self.layer.norm)
        words, result, _weights = self.words_of_sum(self.plan)
        wide = len(self.routing.rows) * self.layer.hidden > _SERIAL
        self.plan.combine(words.buffer_info()[0], wide)
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

    def expert_outputs(self, expert: int) -> Tensor:
        """An expert's outputs [n, H], its bias added, before routing weights and norm."""
        layer, entries = self.layer, self.routing.entries(expert)
        out = self.outputs[torch.from_numpy(self.routing.rows[entries])]
        h = out.to(layer.recipe.compute or layer.dtype)
        return h if layer.down_bias is None else h + layer.down_bias[expert].to(h.dtype)

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Biases are added to whatever lies there, so it weighs nothing."""
        self.weights = self.weights.clone()
        for expert in experts:
            at = torch.from_numpy(self.routing.rows[self.routing.entries(expert)])
            self.outputs[at] = 0
            self.weights.view(-1)[at] = 0

    def _at_once(self, plan: CpuLayerPlan, group: array[int]) -> None:
        """One token's only group, the sum over its experts, and what that is added to."""
        words, result, _weights = self.words_of_sum(plan)
        stages, residual = [(plan.group, group), (plan.combine, words)], self.residual
        if residual is not None:
            hidden = residual.shape[-1]
            join = array("q", [0] * layers.NORM_ARGUMENTS)
            join[layers.N_X], join[layers.N_Y] = residual.data_ptr(), result.data_ptr()
            join[layers.N_SUM], join[layers.N_COLUMNS] = result.data_ptr(), hidden
            stages.append((plan.join, join))
        sequence.run(stages)
        self.result = result

    def words_of_sum(self, plan: CpuLayerPlan) -> tuple[array[int], Tensor, Tensor]:
        """(the words of `combine`, where it leaves the result [T, H], what must live until then)"""
        layer, routing, x = self.layer, self.routing, self.x
        tokens, hidden = routing.shape[0], layer.hidden
        bias = None if layer.norm is not None else plan.combine_bias
        rounds = layer.recipe.compute is None
        dtype = layer.recipe.sum_dtype(x, self.weights)
        product = x.dtype if rounds and self.weights.dtype == x.dtype else torch.float32
        weights = self.weights
        narrow = weights.dtype is layer.dtype and weights.is_contiguous()
        if not narrow:
            weights = weights.float().contiguous()
        result = torch.empty(tokens, hidden, dtype=x.dtype)
        out = self.words[3]
        words = array(
            "q",
            [
                *(0, tokens, hidden, *self.routing_words, out, weights.data_ptr()),
                *(out + 4 * (self.sums - self.out), result.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), int(rounds)),
                int(x.dtype in (product, dtype)),
                *(int(dtype == x.dtype), int(narrow)),
            ],
        )
        return words, result, weights

    def words_of_group(
        self,
        plan: CpuLayerPlan,
        experts: Sequence[int],
        slots: Sequence[int],
        carry: bool = False,
        up: bool = True,
        down: bool = True,
    ) -> array[int]:
        """The words of a group; they are named in compiled.py."""
        count, entries = len(experts), len(self.routing.rows)
        scratch, stride = self.kernel.scratch(plan.scratch)
        steps = plan.narrow_steps if entries > len(self.routing.experts) else plan.steps
        return array(
            "q",
            [
                *(0, 0, up, down, count, *self.routing_words, carry, *self.words),
                *(scratch, stride, *plan.tail, *steps, self.narrow, self.kernel.sequential_rows),
                *(*slots, *experts, *[0] * count),
            ],
        )

    def _gate(self, layer: LayerExperts, experts: Sequence[int]) -> None:
        """The module's own activation, expert by expert, as eager calls it."""
        dtype = layer.recipe.compute or layer.dtype
        start = len(self.routing.rows) * self.layer.width
        for expert in experts:
            rows = self.routing.entries(expert)
            at, count = rows.start, rows.stop - rows.start
            h = self.matrix(at * layer.width, count, layer.width)
            act = self.matrix(start + at * layer.inner, count, layer.inner)
            act.copy_(layer.gate(h.to(dtype)))

    def _norm(self, norm: Callable[[Tensor], Tensor]) -> None:
        """Round, add the biases and apply the norm that follows each expert, in place."""
        layer, routing = self.layer, self.routing
        rows = torch.from_numpy(routing.rows)
        out = self.outputs
        h = out[rows].to(layer.recipe.compute or layer.dtype)
        if layer.down_bias is not None:
            experts = torch.from_numpy(routing.experts)
            counts = torch.from_numpy(routing.starts).diff()
            h = h + layer.down_bias[experts.repeat_interleave(counts)].to(h.dtype)
        out[rows] = norm(h).float()


class CpuKernel(Kernel):
    """`kernels="numba"`, and "rounded"."""

    def __init__(self, float32: bool = False, rounded: bool = False) -> None:
        """`float32`: are float32 models computed here too? `rounded`: are encoded weights rounded
        to the model's type before they are used? So does transformers, which expands a checkpoint
        to that type; a layer has the bits of the default kernels on the checkpoint that it would
        save."""
        self.name = "rounded" if rounded else "numba"
        self.sequential_rows = (
            products.FEW
        )  # tokens of an encoded expert up to which each is by itself
        self.rounded, self._float32 = rounded, float32
        self._local = threading.local()

    @contextmanager
    def sequential(self) -> Iterator[None]:
        """For the while every token has the bits that it has alone, of encoded experts too."""
        before, self.sequential_rows = self.sequential_rows, _ALL
        try:
            yield
        finally:
            self.sequential_rows = before

    def supports(self, layer: LayerExperts) -> bool:
        """Is a layer computed here, or left to the eager kernel?"""
        return not layer.fallback_reason and (self._float32 or layer.dtype is not torch.float32)

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> CpuStep | eager.EagerStep:
        if not self.supports(layer):
            return eager.EagerStep(layer, x, routing, weights)
        return CpuStep(self, layer, x, routing, weights)

    def scratch(self, stride: int) -> tuple[int, int]:
        """(address, bytes a thread) of memory that this thread's groups may use; it is kept."""
        size = stride * torch.get_num_threads()
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.data_ptr(), stride
