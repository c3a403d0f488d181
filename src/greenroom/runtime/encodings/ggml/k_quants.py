"""Decoders of ggml's K types: blocks of 256 weights, with small scales under a float16.

q4_k        d f16, dmin f16 | 12 bytes of 8 scales and 8 minima | 128 bytes
            group j of 32 weights: (d * scale[j]) * q - (dmin * min[j])
            bytes 32 m .. 32 m + 31 hold group 2 m (low halves) and 2 m + 1 (high halves)
q5_k        as q4_k, with 32 bytes between scales and codes: bit j of byte i is the fifth bit
            of element i of group j
q6_k        128 bytes of low halves, 64 bytes of high pairs | 16 x i8 | d f16
            group j of 16 weights: (d * scale[j]) * (q - 32)
q2_k        16 bytes: scale[j] (low half), min[j] (high half) | 64 bytes | d f16, dmin f16
            group j of 16 weights: (d * scale[j]) * q - (dmin * min[j])
            bytes 32 m .. 32 m + 31 hold weights 128 m .. 128 m + 127: those of bits 0 and 1,
            then of bits 2 and 3, and so on
q3_k        32 bytes: bit j of byte i is the third bit of weight 32 j + i | 64 bytes as in q2_k |
            12 bytes of 16 scales of six bits: 8 bytes of low halves, 4 bytes of high pairs |
            d f16; group j of 16 weights: (d * (scale[j] - 32)) * (q - 4)
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.ggml.fields import bit_fields, read_half, read_signed


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes to 8 scales and 8 minima of six bits, [n, 8, 1] float32 each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((a & 63, c & 15 | a >> 2 & 48), dim=1)
    minima = torch.cat((b & 63, c >> 4 | b >> 2 & 48), dim=1)
    return scales.float()[..., None], minima.float()[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, bit_fields(blocks[:, 16:], 32, 4, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    low, high = bit_fields(blocks[:, 48:], 32, 4, 2), bit_fields(blocks[:, 16:48], 32, 1, 8)
    return _with_minima(blocks, low | high << 4)


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Expand codes [n, 8, 32] of blocks that begin with d, dmin, scales and minima."""
    scales, minima = _six_bits(blocks[:, 4:16])
    d, dmin = read_half(blocks, 0)[..., None], read_half(blocks, 2)[..., None]
    return (d * scales) * codes.float() - dmin * minima


def _q6_k(blocks: Tensor) -> Tensor:
    low = bit_fields(blocks[:, :128], 64, 4, 2).reshape(len(blocks), 16, 16)
    high = bit_fields(blocks[:, 128:192], 32, 2, 4).reshape(len(blocks), 16, 16)
    d = (read_half(blocks, 208) * read_signed(blocks[:, 192:208]))[..., None]
    return d * ((low | high << 4).float() - 32)


def _q2_k(blocks: Tensor) -> Tensor:
    codes = bit_fields(blocks[:, 16:80], 32, 2, 4).reshape(len(blocks), 16, 16)
    scales, minima = (bits.float() for bits in (blocks[:, :16] & 15, blocks[:, :16] >> 4))
    d, dmin = read_half(blocks, 80), read_half(blocks, 82)
    return (d * scales)[..., None] * codes.float() - (dmin * minima)[..., None]


def _q3_k(blocks: Tensor) -> Tensor:
    low = bit_fields(blocks[:, 32:96], 32, 2, 4).reshape(len(blocks), 16, 16)
    third = bit_fields(blocks[:, :32], 32, 1, 8).reshape(len(blocks), 16, 16)
    scales = bit_fields(blocks[:, 96:104], 8, 4, 2).flatten(1)
    scales = scales | bit_fields(blocks[:, 104:108], 4, 2, 4).flatten(1) << 4
    d = (read_half(blocks, 108) * (scales.float() - 32))[..., None]
    return d * ((low | third << 2).float() - 4)


DECODERS = {"q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q2_k": _q2_k, "q3_k": _q3_k}
