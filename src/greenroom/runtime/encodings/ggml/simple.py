"""Decoders of ggml's types with one scale for 32 weights, or 16.

q8_0        d f16 | 32 x i8                        d * q
q4_0        d f16 | 16 bytes: q[i], q[i + 16]      d * (q - 8)
q4_1        d f16, m f16 | 16 bytes as in q4_0     d * q + m
q5_0        d f16 | 4 bytes: bit i is q[i]'s fifth |
            16 bytes: q[i], q[i + 16], low four    d * (q - 16)
q5_1        d f16, m f16 | 4 and 16 bytes as in q5_0   d * q + m
gguf_mxfp4  e u8  | 16 bytes: q[i], q[i + 16]      2^(e - 128) * twice the e2m1 value, where
                                                   both zeros are positive
gguf_nvfp4  4 x e u8 | 4 times 8 bytes: q[i], q[i + 8]
            group j of 16 weights: half of scale[j], an e4m3 number without sign, times twice the
            e2m1 value; the scale 0x7f is 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenroom.runtime.encodings.fp4 import E2M1
from greenroom.runtime.encodings.ggml.fields import bit_fields, read_half, read_signed


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """Unpack 32 codes of four bits from the 16 bytes at byte `at` of each block, [n, 32]."""
    return bit_fields(blocks[:, at : at + 16], 16, 4, 2).flatten(1)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """Unpack 32 codes: four bytes of fifth bits at byte `at`, then 16 bytes of low bits."""
    fifth = bit_fields(blocks[:, at : at + 4], 1, 1, 8).flatten(1)
    return _nibbles(blocks, at + 4) | fifth << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return read_signed(blocks[:, 2:]) * read_half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return read_half(blocks, 0) * (_nibbles(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return read_half(blocks, 0) * _nibbles(blocks, 4).float() + read_half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return read_half(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return read_half(blocks, 0) * _five_bits(blocks, 4).float() + read_half(blocks, 2)


def _gguf_mxfp4(blocks: Tensor) -> Tensor:
    e = blocks[:, :1].int()
    power = torch.where(e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    return power * _twice_e2m1(_nibbles(blocks, 1))


def _twice_e2m1(codes: Tensor) -> Tensor:
    """Convert e2m1 codes to twice their values, where both zeros are positive."""
    return (torch.tensor(E2M1, device=codes.device) * 2).int().float()[codes.int()]


def _gguf_nvfp4(blocks: Tensor) -> Tensor:
    byte = blocks[:, :4].int()
    exponent, fraction = byte >> 3 & 15, (byte & 7).float()
    normal = (8 + fraction) * torch.exp2((exponent - 11).float())
    halved = torch.where(exponent == 0, fraction * 2**-10, normal).masked_fill(byte == 0x7F, 0)
    codes = bit_fields(blocks[:, 4:], 8, 4, 2).reshape(len(blocks), 4, 16)
    return halved[..., None] * _twice_e2m1(codes)


DECODERS = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "gguf_mxfp4": _gguf_mxfp4,
    "gguf_nvfp4": _gguf_nvfp4,
}
