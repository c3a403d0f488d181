"""Errors for backward passes that need the gradient of streamed experts.

Experts are computed outside autograd, so a backward pass would omit their part and give every
layer before them a wrong gradient. A forward pass is possible, also with gradients enabled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greenroom.errors import UnsupportedCall


class _NoGradient(torch.autograd.Function):
    """Identity function of the experts' output, whose backward pass raises UnsupportedCall."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], *inputs: Tensor) -> Tensor:
        return outputs[0]  # in a list, or it would be a view, which later layers may not write to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedCall(
            "streamed experts have no gradients: model.greenroom.materialize() reads them into"
            " memory, where transformers trains them"
        )


def without_gradient(output: Tensor, *inputs: Tensor) -> Tensor:
    """Mark a tensor, so that a backward pass through it raises UnsupportedCall.

    Gradients must be enabled, and one of the inputs must require one.
    """
    marked: Tensor = _NoGradient.apply([output], *inputs)
    return marked
