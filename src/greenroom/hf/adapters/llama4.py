"""Adapter for Llama 4, where the gate weight multiplies an expert's input.

transformers gives every expert all tokens, with zeros for tokens that did not choose it. Here only
the chosen expert is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.errors import UnsupportedModel
from greenroom.hf.adapters.helpers.experts_interface import Adapter, Experts, replace_forward


class Llama4Experts(Experts):
    """Experts of Llama 4, in transformers' eager form: every expert computes all tokens."""

    own_arithmetic = True

    def weighted_output(
        self, x: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, expert: int
    ) -> Tensor:
        rows = torch.zeros_like(x)
        rows[tokens] = x[tokens]
        gate, linear = torch.bmm(rows[None], up[None]).chunk(2, dim=-1)
        return torch.bmm(linear * self.act_fn(gate), down[None])[0, tokens] * weights


def adapt(block: Any, model: PreTrainedModel) -> None:
    old = block.experts
    if block.top_k != 1:
        raise UnsupportedModel(
            f"{type(model).__name__}: its config routes {block.top_k} experts per token; only"
            " checkpoints with one expert per token (num_experts_per_tok=1) are supported"
        )
    block.experts = Llama4Experts(
        model,
        tuple(old.gate_up_proj.shape),
        tuple(old.down_proj.shape),
        old.gate_up_proj.dtype,
        old.act_fn,
        is_transposed=True,
    )
    replace_forward(block, _forward)


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama4TextMoe.forward for one expert a token, whose input is scaled by its gate weight."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    index = torch.topk(logits, 1, dim=1).indices
    routed = self.experts(x * scores.gather(1, index), index, torch.ones_like(x[:, :1]))
    return self.shared_expert(x).add_(routed), logits


ADAPTER = Adapter("Llama4TextMoe", adapt, "gate weights scale inputs")
