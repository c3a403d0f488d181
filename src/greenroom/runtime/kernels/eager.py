"""The reference kernel: the operations of transformers' eager experts forward, one by one.

The result is bit for bit that of `experts_implementation="eager"`, for any grouping of experts:
each expert's weighted outputs are stored, and at the end summed by ascending expert id. An encoded
matrix is decoded completely before it is used, so the reference of an encoded model is transformers
with the dequantised checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from greenroom.core.layout import PLAIN, WeightSpec
from greenroom.runtime.encodings import decode
from greenroom.runtime.kernels import base
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class EagerStep(base.KernelStep):
    """One MoE layer's computation by the eager kernel, expert by expert.

    `outputs` has for each computed expert (indices of its tokens, their weighted outputs [n, H]).
    """

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
        accumulate: bool = False,
    ) -> None:
        device = self.x.device
        for expert, slot in zip(experts, slots, strict=True):
            rows = self.routing.entries(expert)
            tokens = torch.from_numpy(self.routing.tokens[rows]).to(device)
            ranks = torch.from_numpy(self.routing.ranks[rows]).to(device)
            up, down = (self.matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            weights = self.weights[tokens, ranks, None]
            if layer.weighted_output is not None:
                out = layer.weighted_output(self.x, tokens, weights, up, down, expert)
            else:
                out = expert_forward(layer, expert, self.x[tokens], up, down) * cast(layer, weights)
            self.outputs[expert] = tokens, out

    def matrix(self, layer: LayerExperts, slot: int, weight: WeightSpec) -> Tensor:
        """Return one expert's weight matrix from its slot, decoded, in the module's layout."""
        return expert_matrix(layer, slot, weight)

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
    """The reference expert kernel, with transformers' eager operations: `kernels="eager"`."""

    name = "eager"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> EagerStep:
        return EagerStep(layer, x, routing, weights)


class UnweightedStep(EagerStep):
    """One MoE layer's computation on the host, for experts whose weighted sum a GPU computes.

    `outputs` has for each computed expert (indices of its tokens, their outputs [n, H]). Outputs
    are computed by torch's products, before gate weights and the post-expert norm.
    """

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        accumulate: bool = False,
    ) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            tokens = torch.from_numpy(self.routing.tokens[self.routing.entries(expert)])
            up, down = (expert_matrix(layer, slot, w) for w in (layer.up_weight, layer.down_weight))
            self.outputs[expert] = (
                tokens,
                forward_without_norm(layer, expert, self.x[tokens], up, down),
            )

    def outputs_of(self, experts: Sequence[int]) -> Tensor:
        return torch.cat([self.outputs[expert][1] for expert in experts])


class UnweightedEagerKernel(Kernel):
    """The kernel that computes experts on the host beside a GPU, without compiled code."""

    name = "plain"

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> EagerStep:
        return UnweightedStep(layer, x, routing, weights)


def expert_matrix(layer: LayerExperts, slot: int, weight: WeightSpec) -> Tensor:
    """Return one expert's weight matrix from its slot, decoded, in the module's own layout.

    If the module's layout is transposed, an encoded matrix is decoded and copied: the matrix
    product of a view would round differently.
    """
    parts = [layer.slots.tensor(slot, spec) for spec in weight.parts]
    if weight.encoding == PLAIN:
        return parts[0]
    w = decode(weight, parts, layer.dtype)
    return w.T.contiguous() if layer.transposed else w


def cast(layer: LayerExperts, tensor: Tensor) -> Tensor:
    """Convert a tensor to the data type that an experts layer computes in."""
    compute = layer.recipe.compute
    return tensor if compute is None else tensor.to(compute)


def expert_forward(layer: LayerExperts, expert: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute one expert's output for its tokens x [n, H], before the gate weights.

    The layer's post-expert norm is applied if it has one.
    """
    h = forward_without_norm(layer, expert, x, up, down)
    return h if layer.norm is None else layer.norm(h)


def forward_without_norm(
    layer: LayerExperts, expert: int, x: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Compute one expert's output before gate weights and post-expert norm."""
    h = cast(layer, layer.activate(project(layer, x, up, layer.up_bias, expert)))
    return project(layer, h, down, layer.down_bias, expert)


def project(layer: LayerExperts, x: Tensor, w: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    """Multiply rows with an expert's weight matrix, add its bias, and round after both."""
    x, w = cast(layer, x), cast(layer, w)
    h = x @ w if layer.transposed else linear(x, w)
    return h if bias is None else h + cast(layer, bias[expert])
