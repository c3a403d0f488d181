"""Adapter for Llama 4, where the gate weight multiplies an expert's input.

transformers computes every expert for all tokens, with zeros as input for tokens that did not
choose the expert. Greenroom computes only experts that some token chose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.errors import UnsupportedModel
from greenroom.hf.adapters.helpers.experts_interface import Adapter, Experts, replace_forward


class Llama4Experts(Experts):
    """Experts of Llama 4, computed like transformers' own to give the same bits.

    An expert's input has a row for every token; rows of tokens that did not choose the expert are
    zeros.
    """

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
            f"{type(model).__name__}: num_experts_per_tok is {block.top_k} in the checkpoint's"
            " config, and Greenroom supports this architecture only with 1"
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
    """Replace Llama4TextMoe.forward: each token has one expert, and a gate weight on its input."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    index = torch.topk(logits, 1, dim=1).indices
    routed = self.experts(x * scores.gather(1, index), index, torch.ones_like(x[:, :1]))
    return self.shared_expert(x).add_(routed), logits


ADAPTER = Adapter("Llama4TextMoe", adapt, "gate weights multiply the inputs of experts")
