"""Adapter for NLLB-MoE, which reproduces a fault in transformers' routing.

transformers 5 uses the router's one-hot mask (zeros and ones) as expert ids. So every token goes
only to experts 0 and 1, whatever the router chose. Greenroom does the same, so that a model's
output equals that of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from greenroom.hf.adapters.helpers.experts_interface import Adapter, Experts, merge_experts

NAMES = {"fc1.weight": "up_proj", "fc2.weight": "down_proj"}
NAMES |= {"fc1.bias": "up_proj_bias", "fc2.bias": "down_proj_bias"}


class NllbMoeExperts(Experts):
    """Experts of NLLB-MoE, with biases; outputs are multiplied by 1 - `moe_token_dropout`."""

    own_arithmetic = True
    eager_only = True
    up_proj_bias: Tensor
    down_proj_bias: Tensor
    moe_token_dropout: float

    def weighted_output(
        self, x: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, expert: int
    ) -> Tensor:
        h = self.act_fn(linear(x[tokens], up, self.up_proj_bias[expert]))
        out = linear(h, down, self.down_proj_bias[expert]) * weights
        return out if self.moe_token_dropout <= 0 else out * (1 - self.moe_token_dropout)


def adapt(block: Any, model: PreTrainedModel) -> None:
    old, count = block.experts, block.num_experts
    first = old["expert_0"]
    block.experts = new = NllbMoeExperts(
        model,
        (count, *first.fc1.weight.shape),
        (count, *first.fc2.weight.shape),
        first.fc1.weight.dtype,
        first.act,
        has_gate=False,
        has_bias=True,
    )
    new.moe_token_dropout = old.moe_token_dropout
    for name, linear_layer in (("up_proj_bias", first.fc1), ("down_proj_bias", first.fc2)):
        bias = torch.empty(
            count, *linear_layer.bias.shape, dtype=linear_layer.bias.dtype, device="meta"
        )
        new.register_parameter(name, nn.Parameter(bias, requires_grad=False))


ADAPTER = Adapter(
    "NllbMoeSparseMLP",
    adapt,
    "transformers sends all tokens to experts 0 and 1",
    added=tuple(
        merge_experts(f"experts.{new}", f"experts.expert_*.{old}") for old, new in NAMES.items()
    ),
    warning="NLLB-MoE: the installed transformers uses only experts 0 and 1 of each layer, by a"
    " fault in its routing; Greenroom computes the same",
)
