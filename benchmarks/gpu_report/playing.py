"""Requests that are played to a model: a prompt and decoded tokens, or a prompt in blocks.

Tokens are random, and routers choose by themselves: a hook that forces their choices would keep
decoding from using graphs. Every run has the same tokens, so about the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from shapes import Shape
from torch import Tensor

PROMPT = 16  # tokens that are read at once before any is decoded
SEED = 0


@dataclass(frozen=True)
class Request:
    """Passes of a request.

    ids: its tokens, [n]
    passes: tokens of each pass
    """

    ids: Tensor
    passes: list[int]

    def tokens(self, number: int) -> Tensor:
        """Return the tokens of a pass: [1, n]."""
        first = sum(self.passes[:number])
        return self.ids[None, first : first + self.passes[number]]


def _request(shape: Shape, passes: list[int]) -> Request:
    ids = np.random.default_rng(SEED).integers(shape.vocabulary, size=sum(passes))
    return Request(torch.from_numpy(ids), passes)


def decoding(shape: Shape, passes: int) -> Request:
    """A request of `passes` passes: a prompt, then one token a pass."""
    return _request(shape, [PROMPT, *[1] * (passes - 1)])


def prefill(shape: Shape, tokens: int, block: int) -> Request:
    """A request with a prompt only, in blocks of `block` tokens."""
    return _request(shape, [block] * (tokens // block))
