"""Adapter for Switch Transformers, encoder-decoder models with one expert per token.

An expert computes at most `expert_capacity` tokens. No expert computes the other tokens that chose
it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from greenroom.hf.adapters.helpers.experts_interface import (
    Adapter,
    Experts,
    merge_experts,
    replace_forward,
)


def adapt(block: Any, model: PreTrainedModel) -> None:
    count, first = block.experts.num_experts, block.experts["expert_0"]
    block.experts = Experts(
        model,
        (count, *first.wi.weight.shape),
        (count, *first.wo.weight.shape),
        first.wi.weight.dtype,
        first.act,
        has_gate=False,
    )
    replace_forward(block, _forward)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Replace SwitchTransformersSparseMLP.forward, whose router returns a one-hot mask."""
    mask, weights, _ = self.router(hidden_states)
    mask = mask.flatten(0, 1)
    # A row of zeros is a token without an expert; it gets an id that no expert has.
    index = mask.argmax(1).masked_fill(mask.sum(1) == 0, self.experts.num_experts)
    out = self.experts(hidden_states.flatten(0, 1), index[:, None], weights.view(-1, 1))
    return out.view_as(hidden_states)


ADAPTER = Adapter(
    "SwitchTransformersSparseMLP",
    adapt,
    added=(
        merge_experts("experts.up_proj", "experts.expert_*.wi.weight"),
        merge_experts("experts.down_proj", "experts.expert_*.wo.weight"),
    ),
)
