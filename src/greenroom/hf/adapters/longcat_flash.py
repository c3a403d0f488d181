"""Adapter for LongCat Flash, where some experts return their input and have no weights.

These identity experts have the highest ids. Adding their outputs last keeps transformers' order of
summation, and so its bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.hf.adapters.helpers.experts_interface import (
    Adapter,
    Experts,
    experts_numbered_from,
    replace_forward,
)


def adapt(block: Any, model: PreTrainedModel) -> None:
    old = block.experts
    count, (hidden, inner) = old.num_routed_experts, old.down_proj.shape[1:]
    block.experts = Experts(
        model,
        (count, 2 * inner, hidden),
        (count, hidden, inner),
        old.down_proj.dtype,
        old.act_fn,
    )
    replace_forward(block, _forward)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Replace LongcatFlashMoE.forward: expert ids from `num_experts` on are identity experts."""
    shape = hidden_states.shape
    _, weights, index = self.router(hidden_states)
    x = hidden_states.view(-1, shape[-1])
    total = self.experts(x, index, weights)
    if not index.is_meta:
        for expert in index.unique().tolist():
            if expert >= self.experts.num_experts:
                ranks, tokens = torch.nonzero(expert == index.T, as_tuple=True)
                total.index_add_(0, tokens, (x[tokens] * weights[tokens, ranks, None]).to(x.dtype))
    return total.view(*shape)


ADAPTER = Adapter(
    "LongcatFlashMoE",
    adapt,
    "identity experts need no weights",
    # transformers saves weights for identity experts too.
    is_unused=experts_numbered_from("n_routed_experts"),
)
