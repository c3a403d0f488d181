"""Errors for backward passes that need the gradient of streamed experts.

Streamed experts are computed outside of autograd. A backward pass would omit their contribution, so
every layer before them would get a wrong gradient. Forward passes with gradients enabled work.
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
            "a backward pass needs the gradients of streamed experts, which do not exist: to train"
            " the model, call model.greenroom.materialize(), which reads all experts into memory"
        )


def without_gradient(output: Tensor, *inputs: Tensor) -> Tensor:
    """Return a tensor with the same values whose backward pass raises UnsupportedCall.

    Gradients must be enabled, and one of the inputs must require a gradient.
    """
    marked: Tensor = _NoGradient.apply([output], *inputs)
    return marked
