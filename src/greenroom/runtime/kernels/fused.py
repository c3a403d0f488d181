"""The default kernel on a CPU: one compiled call a wave, at the speed of memory.

Weights are read in place from the slots, widened in registers and multiplied in float32; values
are rounded where eager rounds them. An element of the result depends only on its token, its
experts and their weights: not on the wave, the slot, the batch, or the number of threads. The
down projection is summed in blocks of 64 of the intermediate dimension, so an expert can be cut
at such a boundary into pieces that are computed one after the other, without changing a bit.

A float32 model is left to the eager kernel by default: there the order of summation is the whole
distance to eager, and transformers' `grouped_mm`, which calls the same matrix product as eager,
is nearer to it than any other order can be.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from greenroom.runtime.kernels import compiled, eager
from greenroom.runtime.kernels.activation import Activation, find_activation
from greenroom.runtime.kernels.base import LayerExperts
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.jit import body
from greenroom.runtime.kernels.openmp import Body
from greenroom.runtime.kernels.routing import Routing

_SERIAL = 1 << 16  # elements below which the sum over experts is not worth a second thread


def _bits(value: float) -> int:
    """A float32's bits."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class Plan:
    """What never changes for a layer: compiled bodies and the constant words of their arguments."""

    __slots__ = ("activation", "combine", "combine_bias", "tail", "up_bias", "wave", "wide")

    def __init__(self, layer: LayerExperts, activation: Activation | None = None) -> None:
        self.activation = activation or find_activation(layer)
        self.wave: Body = body(compiled.wave, layer.dtype)
        self.combine: Body = body(compiled.combine, layer.dtype)
        self.wide = max(layer.hidden, layer.inner)
        self.up_bias, self.combine_bias = layer.up_bias, layer.down_bias
        self.tail = [
            *(layer.slots.base, layer.slots.stride, layer.up.offset, layer.down.offset),
            *(layer.hidden, layer.inner, layer.width, int(layer.transposed)),
            *(int(layer.interleaved), 0 if self.up_bias is None else self.up_bias.data_ptr()),
            *(self.activation.code, _bits(self.activation.limit), _bits(self.activation.alpha)),
            int(layer.recipe.compute is None),
        ]


def plan_of(layer: LayerExperts) -> Plan:
    """The layer's plan, made at its first use."""
    if layer.plan is None:
        layer.plan = Plan(layer)
    return layer.plan  # type: ignore[return-value]


class Step:
    """A step under way. All float32: x [T, H]; mid [S, 2I]; act [S, I]; out [T * K, H]."""

    __slots__ = ("act", "layer", "mid", "out", "routing", "weights", "words", "x", "x32")

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        self.layer, self.x, self.routing = layer, x, routing
        self.x32 = x.float().contiguous()
        self.weights = weights
        tokens, top_k = routing.shape
        entries = len(routing.rows)
        buffer = torch.empty(entries * (layer.width + layer.inner) + tokens * top_k * layer.hidden)
        end = entries * layer.width
        self.mid, buffer = buffer[:end], buffer[end:]
        end = entries * layer.inner
        self.act, self.out = buffer[:end], buffer[end:]
        self.words = [
            *(len(routing.experts), routing.experts.ctypes.data, routing.starts.ctypes.data),
            *(routing.tokens.ctypes.data, routing.rows.ctypes.data),
        ]


class Fused:
    """`kernels="numba"`; `float32` says whether float32 models are computed here too."""

    name = "numba"

    def __init__(self, float32: bool = False) -> None:
        self._eager = None if float32 else Eager()

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> Step | eager.Step:
        """Start a step: x [T, H], weights [T, K]."""
        if self._eager is not None and layer.dtype is torch.float32:
            return self._eager.begin(layer, x, routing, weights)
        return Step(layer, x, routing, weights)

    def wave(
        self,
        step: Step | eager.Step,
        experts: Sequence[int],
        slots: Sequence[int],
        part: LayerExperts | None = None,
        carry: bool = False,
    ) -> None:
        """Compute experts of the step from their slots.

        part:  where only a piece of each expert is computed, the layer as that piece's layout
               describes it: some multiple of 64 of the intermediate dimension
        carry: add to what the pieces before left, rather than start from nothing
        """
        if isinstance(step, eager.Step):
            return Eager().wave(step, experts, slots)
        layer = part or step.layer
        plan = plan_of(layer)
        if plan.activation.code != compiled.RAW:
            return self._call(plan, step, experts, slots, carry, True, True)
        self._call(plan, step, experts, slots, carry, True, False)
        self._gate(layer, step, experts)
        return self._call(plan, step, experts, slots, carry, False, True)

    def combine(self, step: Step | eager.Step) -> Tensor:
        """The sum over each token's experts [T, H], in x's type, by ascending id."""
        if isinstance(step, eager.Step):
            return Eager().combine(step)
        layer, routing, x = step.layer, step.routing, step.x
        plan = plan_of(layer)
        tokens, hidden = routing.shape[0], layer.hidden
        bias, rounds = plan.combine_bias, layer.recipe.compute is None
        if layer.norm is not None:
            self._norm(step)
            bias = None
        dtype = layer.recipe.sum_dtype(x, step.weights)
        product = x.dtype if rounds and step.weights.dtype == x.dtype else torch.float32
        weights = step.weights.float().contiguous()
        sums = torch.empty(tokens, hidden)
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        words = array(
            "q",
            [
                *(0, tokens, hidden, *step.words[:3], step.words[3], step.words[4]),
                *(step.out.data_ptr(), weights.data_ptr(), sums.data_ptr(), result.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), int(rounds)),
                int(x.dtype in (product, dtype)),
                int(dtype == x.dtype),
            ],
        )
        plan.combine(words.buffer_info()[0], len(routing.rows) * hidden > _SERIAL)
        return result

    def _call(
        self,
        plan: Plan,
        step: Step,
        experts: Sequence[int],
        slots: Sequence[int],
        carry: bool,
        up: bool,
        down: bool,
    ) -> None:
        """Run the compiled wave; the words are named in compiled.py."""
        count, scratch, stride = len(experts), 0, 0
        if len(step.routing.rows) >= compiled.MANY:
            buffer = torch.empty(torch.get_num_threads() * compiled.GROUP * plan.wide)
            scratch, stride = buffer.data_ptr(), 4 * compiled.GROUP * plan.wide
        words = array(
            "q",
            [
                *(0, 0, up, down, count, *step.words, carry, step.x32.data_ptr()),
                *(step.mid.data_ptr(), step.act.data_ptr(), step.out.data_ptr()),
                *(scratch, stride, *plan.tail, *slots, *experts, *[0] * count),
            ],
        )
        plan.wave(words.buffer_info()[0])

    def _gate(self, layer: LayerExperts, step: Step, experts: Sequence[int]) -> None:
        """The module's own activation, expert by expert, as eager calls it."""
        dtype = layer.recipe.compute or layer.dtype
        mid, act = step.mid.view(-1), step.act.view(-1)
        for expert in experts:
            rows = step.routing.entries(expert)
            a, b = rows.start, rows.stop
            h = mid[a * layer.width : b * layer.width].view(b - a, layer.width)
            act[a * layer.inner : b * layer.inner].view(b - a, layer.inner).copy_(
                layer.gate(h.to(dtype))
            )

    def _norm(self, step: Step) -> None:
        """Round, add the biases and apply the norm that follows each expert, in place."""
        layer, routing = step.layer, step.routing
        rows = torch.from_numpy(routing.rows)
        out = step.out.view(-1, layer.hidden)
        h = out[rows].to(layer.recipe.compute or layer.dtype)
        if layer.down_bias is not None:
            experts = torch.from_numpy(routing.experts)
            counts = torch.from_numpy(routing.starts).diff()
            h = h + layer.down_bias[experts.repeat_interleave(counts)].to(h.dtype)
        out[rows] = layer.norm(h).float()  # type: ignore[misc]
