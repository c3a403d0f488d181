"""Base class of the encodings in which quantised matrices are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding of quantised matrices [outputs, inputs], with the function that decodes them.

    expand:     function of the codes and the companions, which returns the matrix's values row by
                row, in any shape, and does not change its arguments
    companions: names of the tensors stored with the codes, such as `scale`; in a slot their names
                are `<matrix>.<companion>`
    float32:    the companions that are float32 in memory, whatever float type a file has
    """

    name: str
    expand: Callable[..., Tensor]
    companions: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()

    def dtype(self, companion: str, stored: str) -> str:
        """Return a companion's dtype in memory, given its dtype in the file."""
        return "float32" if companion in self.float32 else stored

    def decode(self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode a quantised matrix to a tensor of the given shape and dtype.

        `parts` are the tensor of codes and the companion tensors, such as the scales, in the order
        of `companions`.
        """
        return self.expand(*parts).reshape(shape).to(dtype)


def nibbles(codes: Tensor) -> Tensor:
    """Split bytes into 4-bit halves, the low half first: [..., n] -> [..., 2n]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
