"""Blocks (MLP or MoE) for several tokens, each with the bits of one.

Compiled products and expert kernels compute each of a few tokens as they compute one. Products of
torch do not: those of a router, say, whose logits may then choose another expert. So a block of any
architecture is called once for all tokens, and only its parts that torch computes are called token
by token. The experts of all tokens are then computed in one step.

torch computes activations in whole vectors, and what is left of a tensor by other code. So the
widths of a block's parts must be multiples of `VECTOR`; else tokens are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

VECTOR = 64  # numbers: all of torch's vectors are parts of it


class _OtherShapeError(Exception):
    """A part of a block gets or returns tensors that do not have one row for each token."""


def call_for_tokens(block: nn.Module, x: Tensor) -> Tensor:
    """Return a block's output for some tokens, each with the bits of one.

    x: [1, tokens, hidden]
    """
    tokens = x.shape[1]
    if tokens > 1:
        try:
            parts = list(_torch_parts(block))
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(_token_by_token(part, tokens))
                return block(x)
        except _OtherShapeError:
            pass
    return torch.cat([block(token) for token in x.split(1, 1)], 1)


def _torch_parts(block: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a block's parts with weights of their own that torch computes.

    Experts are not among them, since their kernel computes tokens one by one. Raises
    _OtherShapeError if a part's width is not a multiple of `VECTOR`.
    """
    parts = [block]
    while parts:
        part = parts.pop()
        if hasattr(part, "num_experts") and hasattr(part, "_apply_gate"):
            continue
        tensors = (*part._parameters.values(), *part._buffers.values())
        if isinstance(part, nn.Linear) or any(each is not None for each in tensors):
            if "forward" not in vars(part):  # no compiled code
                yield part
            elif getattr(part, "out_features", 0) % VECTOR:
                raise _OtherShapeError
            continue
        parts += part.children()


@contextmanager
def _token_by_token(part: nn.Module, tokens: int) -> Iterator[None]:
    """Let a module compute one token at a time, for one context."""
    original: Callable[..., Any] = part.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = x.dim() - 2
        if args or kwargs or place not in (0, 1) or x.numel() != tokens * x.shape[-1]:
            raise _OtherShapeError
        return _joined([original(each) for each in x.split(1, place)], place)

    part.forward = forward
    try:
        yield
    finally:
        del part.forward


def _joined(outputs: list[Any], place: int) -> Any:
    """Join a module's outputs for single tokens; `place` is the dimension of its input's tokens."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each), place) for each in zip(*outputs, strict=True))
    if not isinstance(first, Tensor):
        raise _OtherShapeError
    at = place if first.dim() == place + 2 else 0
    if first.dim() < 2 or first.shape[at] != 1 or first.shape[:at].numel() != 1:
        raise _OtherShapeError
    return torch.cat(outputs, at)
