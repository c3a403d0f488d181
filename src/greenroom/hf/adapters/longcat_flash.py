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
    if len(x) == 1:
        return _add_identities(total, x, index, weights, self.experts.num_experts).view(*shape)
    if not index.is_meta:
        for expert in index.unique().tolist():
            if expert >= self.experts.num_experts:
                ranks, tokens = torch.nonzero(expert == index.T, as_tuple=True)
                total.index_add_(0, tokens, (x[tokens] * weights[tokens, ranks, None]).to(x.dtype))
    return total.view(*shape)


def _add_identities(total: Tensor, x: Tensor, index: Tensor, weights: Tensor, first: int) -> Tensor:
    """Add one token's identity experts, whose ids begin with `first`, by ascending id.

    No value is brought to the host, which a GPU would have to wait for, and no graph can do.
    """
    index, order = index.sort(dim=1)
    for expert, weight in zip(index.T, weights.gather(1, order).T, strict=True):
        added = total + (x * weight[:, None]).to(x.dtype)
        total = torch.where(expert[:, None] >= first, added, total)
    return total


ADAPTER = Adapter(
    "LongcatFlashMoE",
    adapt,
    "identity experts need no weights",
    # transformers saves weights for identity experts too.
    is_unused=experts_numbered_from("n_routed_experts"),
)
