"""Decoders of ggml's ternary types: blocks of 256 weights, which are -d, 0 or d.

tq2_0       64 bytes | d f16                       d * (q - 1)
            bytes 32 m .. 32 m + 31 hold weights 128 m .. 128 m + 127: those of bits 0 and 1,
            then of bits 2 and 3, and so on
tq1_0       32, 16 and 4 bytes | d f16             d * (q - 1)
            a byte holds the weights of five runs (of four in the last four bytes) as digits of
            base 3: digit i is the product byte * 3^i modulo 256, times 3 / 256, rounded down
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.ggml.fields import bit_fields, read_half


def _digits(codes: Tensor, count: int) -> Tensor:
    """Unpack `count` digits of base 3 from each byte: [n, m] -> [n, count * m]."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=codes.device)
    return ((codes[:, None] * powers[:, None]).int() * 3 >> 8).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    parts = _digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)
    return read_half(blocks, 52) * (torch.cat(parts, dim=1).float() - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    return read_half(blocks, 64) * (bit_fields(blocks[:, :64], 32, 2, 4).flatten(1).float() - 1)


DECODERS = {"tq1_0": _tq1_0, "tq2_0": _tq2_0}
