"""What an encoding is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a matrix of [outputs, inputs].

    expand:     (codes, companions, ...) -> its values row by row, in any shape; these are not
                changed
    companions: what is stored beside the codes; the tensors are called `<matrix>.<companion>`
    """

    name: str
    expand: Callable[..., Tensor]
    companions: tuple[str, ...] = ()

    def decode(self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The matrix of that shape, in that dtype; `parts` are as `WeightSpec.parts` names them."""
        return self.expand(*parts).reshape(shape).to(dtype)


def nibbles(codes: Tensor) -> Tensor:
    """The halves of each byte, the low one first: uint8 [..., n] -> uint8 [..., 2n]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
