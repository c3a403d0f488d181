"""What an encoding is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from greenroom.core.layout import BLOCKS

Decode = Callable[[Sequence[Tensor], tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a matrix of [outputs, inputs].

    decode:     (parts, shape, dtype) -> the matrix of that shape, in that dtype. `parts` are the
                codes and the companions, as `WeightSpec.parts` names them; they are not changed
    companions: what is stored beside the codes; the tensors are called `<matrix>.<companion>`
    """

    name: str
    decode: Decode
    companions: tuple[str, ...] = ()

    @property
    def block(self) -> int:
        """Inputs that are encoded together."""
        return BLOCKS[self.name][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCKS[self.name][1]

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row's codes; `columns` must be a multiple of the block."""
        return columns // self.block * self.block_bytes


def nibbles(codes: Tensor) -> Tensor:
    """The halves of each byte, the low one first: uint8 [..., n] -> uint8 [..., 2n]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
