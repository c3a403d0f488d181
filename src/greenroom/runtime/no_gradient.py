"""Raise where a backward pass would need the gradient of streamed experts.

Experts are computed outside autograd, so a backward pass would leave their part out and give every
layer before them a wrong gradient. A forward pass alone stays possible, with gradients enabled too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greenroom.errors import UnsupportedCall


class _NoGradient(torch.autograd.Function):
    """The experts' output, which depends on their inputs in a way that has no gradient here."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *inputs: Tensor) -> Tensor:
        return made[0]  # in a list, or it would be a view, which later layers may not write to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedCall(
            "streamed experts have no gradients: model.greenroom.materialize() reads them into"
            " memory, where transformers trains them"
        )


def without_gradient(output: Tensor, *inputs: Tensor) -> Tensor:
    """An output that raises UnsupportedCall where a backward pass comes to it; call it where
    gradients are enabled and an input requires one."""
    made: Tensor = _NoGradient.apply([output], *inputs)
    return made
