"""The reference kernel: the operations of transformers' eager experts forward, one by one.

Bit for bit what `experts_implementation="eager"` computes, in any order of groups: each expert's
weighted outputs are kept, and summed by ascending id at the end. An encoded matrix is expanded as a
whole before it is used, so its reference is eager on the expanded checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from greenroom.core.layout import PLAIN, WeightSpec
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels import base
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class EagerStep(base.KernelStep):
    """A step under way: per expert the tokens and their weighted outputs."""

    __slots__ = ("outputs",)

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        super().__init__(layer, x, routing, weights)
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        self.compute_from(experts, slots, self.layer)

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        carry: bool = False,
    ) -> None:
        device = self.x.device
        for expert, slot in zip(experts, slots, strict=True):
            rows = self.routing.entries(expert)
            tokens = torch.from_numpy(self.routing.tokens[rows]).to(device)
            ranks = torch.from_numpy(self.routing.ranks[rows]).to(device)
            up, down = (matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            weights = self.weights[tokens, ranks, None]
            if layer.own is not None:
                out = layer.own(self.x, tokens, weights, up, down, expert)
            else:
                out = forward(layer, expert, self.x[tokens], up, down) * cast(layer, weights)
            self.outputs[expert] = tokens, out

    def total(self) -> Tensor:
        dtype = self.layer.recipe.sum_dtype(self.x, self.weights)
        total = torch.zeros_like(self.x, dtype=dtype)
        for expert in sorted(self.outputs):
            tokens, out = self.outputs[expert]
            total.index_add_(0, tokens, out.to(dtype))
        return total.to(self.x.dtype)

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        device = self.x.device
        for expert in experts:
            tokens, out = other.outputs[expert]
            self.outputs[expert] = tokens.to(device), out.to(device, non_blocking=True)

    def host_kernel(self, layer: LayerExperts) -> EagerKernel:
        return EagerKernel()


class EagerKernel(Kernel):
    """`kernels="eager"`."""

    name = "eager"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> EagerStep:
        return EagerStep(layer, x, routing, weights)


class UnweightedStep(EagerStep):
    """Each expert's outputs [n, H] by themselves, for a device's step that sums: before routing
    weights and norm, by torch's own products."""

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        carry: bool = False,
    ) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            tokens = torch.from_numpy(self.routing.tokens[self.routing.entries(expert)])
            up, down = (matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            self.outputs[expert] = tokens, unnormed(layer, expert, self.x[tokens], up, down)

    def expert_outputs(self, expert: int) -> Tensor:
        """An expert's outputs."""
        return self.outputs[expert][1]


class UnweightedEagerKernel(Kernel):
    """For layers that no compiled kernel knows, beside a device that sums."""

    name = "plain"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> EagerStep:
        return UnweightedStep(layer, x, routing, weights)


def matrix(layer: LayerExperts, slot: int, weight: WeightSpec) -> Tensor:
    """A matrix of the expert in a slot, as the module has it: expanded, and transposed by its flag.

    The transposed one is copied: a view would make the matrix product round another way.
    """
    parts = [layer.slots.tensor(slot, spec) for spec in weight.parts]
    if weight.encoding == PLAIN:
        return parts[0]
    w = ENCODINGS[weight.encoding].decode(parts, weight.shape, layer.dtype)
    return w.T.contiguous() if layer.transposed else w


def cast(layer: LayerExperts, tensor: Tensor) -> Tensor:
    """A tensor in the type that the layer computes in."""
    compute = layer.recipe.compute
    return tensor if compute is None else tensor.to(compute)


def forward(layer: LayerExperts, expert: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert's output for its rows x [n, H], before the routing weights."""
    h = unnormed(layer, expert, x, up, down)
    return h if layer.norm is None else layer.norm(h)


def unnormed(layer: LayerExperts, expert: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same before a norm that follows each expert."""
    h = cast(layer, layer.gate(project(layer, x, up, layer.up_bias, expert)))
    return project(layer, h, down, layer.down_bias, expert)


def project(layer: LayerExperts, x: Tensor, w: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    """x @ w (+ bias), rounded after the product and after the sum."""
    x, w = cast(layer, x), cast(layer, w)
    h = x @ w if layer.transposed else linear(x, w)
    return h if bias is None else h + cast(layer, bias[expert])
