"""Adapter for JetMoE: attention experts stay in memory, MLP experts are read when needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from greenroom.hf.adapters.helpers.experts_interface import Adapter, Experts, replace_forward


def adapt(block: Any, model: PreTrainedModel) -> None:
    up, down = block.input_linear.weight, block.output_linear.weight
    block.experts = Experts(model, tuple(up.shape), tuple(down.shape), up.dtype, block.activation)
    del block.input_linear, block.output_linear
    replace_forward(block, _forward)


def _forward(self: Any, layer_input: Tensor) -> Tensor:
    """Replace JetMoeMoE.forward: restore the order of tokens, which its router sorts by expert."""
    order, _, gates, sizes, _ = self.router(layer_input.reshape(-1, self.input_size))
    shape = (-1, self.router.top_k)
    if gates.is_meta:
        index = torch.empty_like(order)
    else:
        index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    index = torch.empty_like(order).scatter_(0, order, index).view(shape)
    weights = torch.empty_like(gates).scatter_(0, order, gates).view(shape)
    out = self.experts(layer_input.reshape(-1, self.input_size), index, weights)
    return out.view_as(layer_input) + self.bias


ADAPTER = Adapter(
    "JetMoeMoE",
    adapt,
    "the attention's experts stay in memory",
    added=(
        WeightRenaming("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
        WeightRenaming("mlp.output_linear.weight", "mlp.experts.down_proj"),
    ),
)
