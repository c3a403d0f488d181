"""Base class of the encodings in which quantised matrices are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding of quantised matrices, with the function that decodes them.

    A matrix has the shape [outputs, inputs].

    expand:     (codes, companions, ...) -> its values row by row, in any shape; the arguments are
                not changed
    companions: tensors stored with the codes, named `<matrix>.<companion>`
    """

    name: str
    expand: Callable[..., Tensor]
    companions: tuple[str, ...] = ()

    def decode(self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode a quantised matrix to a shape and dtype.

        `parts` has the tensors of `WeightSpec.parts`.
        """
        return self.expand(*parts).reshape(shape).to(dtype)


def nibbles(codes: Tensor) -> Tensor:
    """Split bytes into 4-bit halves, the low half first: [..., n] -> [..., 2n]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
