"""Read the fields of ggml blocks: half-precision scales and packed bit fields."""

from __future__ import annotations

import torch
from torch import Tensor


def read_half(blocks: Tensor, at: int) -> Tensor:
    """Read the float16 at byte `at` of each block, as [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def read_signed(blocks: Tensor) -> Tensor:
    """Read bytes as signed integers, in float32."""
    return blocks.contiguous().view(torch.int8).float()


def bit_fields(codes: Tensor, width: int, bits: int, count: int) -> Tensor:
    """Unpack bit fields of bytes.

    Runs of `width` bytes hold `count` groups of `bits`-bit fields -> [n, groups, width].
    """
    runs = codes.reshape(len(codes), -1, 1, width)
    shift = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=codes.device).view(-1, 1)
    return ((runs >> shift) & (2**bits - 1)).flatten(1, 2)


def read_integers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Read consecutive bytes [n, m] as signed integers of a wider type.

    The bytes are copied: those of one block may begin at any address.
    """
    return codes.clone(memory_format=torch.contiguous_format).view(dtype)
