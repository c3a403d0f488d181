"""Adapter for DBRX, whose experts are stacked along the rows of two-dimensional tensors.

The tensor `w2` (down projection) is stored transposed. It is transposed when it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Transpose,
    WeightConverter,
)

from greenroom.hf.adapters.helpers.experts_interface import Adapter, Experts, replace_forward


class DbrxExperts(Experts):
    """Experts of DBRX, with separate matrix products for the gate and up projections."""

    own_arithmetic = True

    def weighted_output(
        self, x: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, expert: int
    ) -> Tensor:
        w1, v1 = up.chunk(2)
        x = x[tokens]
        h = self.act_fn(linear(x, w1)) * linear(x, v1)
        return h.matmul(down.T.contiguous()) * weights


class StackedRows(ConversionOps):
    """Weight conversion that reshapes stacked matrices to [experts, rows, columns]."""

    stacked = True  # the tensor has no expert axis

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        experts = kwargs["config"].ffn_config.moe_num_experts
        unstacked = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            unstacked[name] = tensor if tensor.ndim == 3 else tensor.unflatten(0, (experts, -1))
        return unstacked


def adapt(block: Any, model: PreTrainedModel) -> None:
    old = block.experts
    count, hidden, inner = old.num_experts, old.hidden_size, old.ffn_hidden_size
    block.experts = DbrxExperts(
        model,
        (count, 2 * inner, hidden),
        (count, hidden, inner),
        old.mlp.w1.dtype,
        old.mlp.activation_fn,
    )
    replace_forward(block, _forward)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Replace DbrxFFN.forward: the experts get hidden states with one row per token."""
    weights, index = self.route_tokens_to_experts(self.router(hidden_states))
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    return self.experts(x, index, weights).view_as(hidden_states)


ADAPTER = Adapter(
    "DbrxFFN",
    adapt,
    "a third of each expert is transposed when it is read",
    added=(
        WeightConverter(
            source_patterns=["experts.mlp.w1", "experts.mlp.v1"],
            target_patterns="experts.gate_up_proj",
            operations=[StackedRows(), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="experts.mlp.w2",
            target_patterns="experts.down_proj",
            operations=[StackedRows(), Transpose(1, 2)],
        ),
    ),
)
