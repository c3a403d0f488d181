"""A faster experts computation for training on processors, as one differentiable operation.

The tokens are sorted by expert once; each expert then is three plain matrix products over its
slice. Gradients come back through the inverse order (a gather), where the generic versions
accumulate into an index, which is slow on a CPU. Registered with transformers under the name
``sorted``; the numbers are those of the ``eager`` experts up to rounding.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "sorted"


class SortedExperts(torch.autograd.Function):
    """Sum over the top-k of weight * down(silu(gate(x)) * up(x)), the experts in two tensors."""

    @staticmethod
    def forward(
        ctx, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        top_k, width = ids.shape[1], down.shape[2]
        order = ids.flatten().argsort(stable=True)
        bounds = [0, *torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).cumsum(0).tolist()]
        inputs = x.index_select(0, order // top_k)
        both = inputs.new_empty(inputs.shape[0], 2 * width)
        hidden = inputs.new_empty(inputs.shape[0], width)
        outputs = torch.empty_like(inputs)
        for expert, (a, b) in enumerate(itertools.pairwise(bounds)):
            if a < b:
                torch.mm(inputs[a:b], gate_up[expert].t(), out=both[a:b])
        torch.mul(F.silu(both[:, :width]), both[:, width:], out=hidden)
        for expert, (a, b) in enumerate(itertools.pairwise(bounds)):
            if a < b:
                torch.mm(hidden[a:b], down[expert].t(), out=outputs[a:b])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        chosen = outputs.index_select(0, inverse).view(*ids.shape, -1)
        ctx.save_for_backward(inputs, both, hidden, chosen, weights, order, inverse, gate_up, down)
        ctx.bounds = bounds
        return torch.einsum("tk,tkh->th", weights, chosen)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, both, hidden, chosen, weights, order, inverse, gate_up, down = ctx.saved_tensors
        top_k, width = weights.shape[1], down.shape[2]
        d_weights = torch.einsum("th,tkh->tk", grad, chosen)
        d_outputs = grad.index_select(0, order // top_k).mul_(weights.flatten()[order, None])
        d_hidden, d_inputs = torch.empty_like(hidden), torch.empty_like(inputs)
        d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        spans = [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(ctx.bounds)) if a < b]
        for expert, a, b in spans:
            torch.mm(d_outputs[a:b], down[expert], out=d_hidden[a:b])
            torch.mm(d_outputs[a:b].t(), hidden[a:b], out=d_down[expert])
        gate, up = both[:, :width], both[:, width:]
        d_both = torch.empty_like(both)
        sigmoid = torch.sigmoid(gate)
        swish = gate * sigmoid
        torch.mul(d_hidden, swish, out=d_both[:, width:])
        # d silu(g)/dg = s + silu(g) (1 - s)
        slope = torch.addcmul(sigmoid, swish, 1 - sigmoid)
        torch.mul(d_hidden.mul_(up), slope, out=d_both[:, :width])
        for expert, a, b in spans:
            torch.mm(d_both[a:b], gate_up[expert], out=d_inputs[a:b])
            torch.mm(d_both[a:b].t(), inputs[a:b], out=d_gate_up[expert])
        d_x = d_inputs.index_select(0, inverse).view(-1, top_k, inputs.shape[1]).sum(1)
        return d_x, None, d_weights, d_gate_up, d_down


def sorted_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    return SortedExperts.apply(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
    )


def register() -> None:
    ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)
