"""Decoders of GGUF's block formats, in which rows are runs of ggml blocks.

The codes are uint8 [rows, row bytes]; scales lie inside the blocks. Layouts and arithmetic are
those of ggml's `dequantize_row_*` and of gguf's `quants.py`, which are the reference: everything
in float32, one rounding after each product and each difference.

Each entry has the fields of a block in their order, separated by | (f16 is a float16, u8 and i8 are
bytes without and with a sign), and the value of a weight with the code q.

    q8_0        d f16 | 32 x i8                        d * q
    q4_0        d f16 | 16 bytes: q[i], q[i + 16]      d * (q - 8)
    q5_0        d f16 | 4 bytes: bit i is q[i]'s fifth |
                16 bytes: q[i], q[i + 16], low four    d * (q - 16)
    gguf_mxfp4  e u8  | 16 bytes: q[i], q[i + 16]      2^(e - 128) * twice the e2m1 value, where
                                                       both zeros are positive
    q4_k        d f16, dmin f16 | 12 bytes of 8 scales and 8 minima | 128 bytes
                group j of 32 weights: (d * scale[j]) * q - (dmin * min[j])
                bytes 32 m .. 32 m + 31 hold group 2 m (low halves) and 2 m + 1 (high halves)
    q5_k        as q4_k, with 32 bytes between scales and codes: bit j of byte i is the fifth bit
                of element i of group j
    q6_k        128 bytes of low halves, 64 bytes of high pairs | 16 x i8 | d f16
                group j of 16 weights: (d * scale[j]) * (q - 32)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from greenroom.core.layout import BLOCKS
from greenroom.runtime.encodings.encoding import Encoding
from greenroom.runtime.encodings.mxfp4 import E2M1


def _half(blocks: Tensor, at: int) -> Tensor:
    """Read the float16 at byte `at` of each block, as [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(codes: Tensor, width: int, bits: int, count: int) -> Tensor:
    """Unpack `bits`-bit fields; runs of `width` bytes hold `count` groups -> [n, groups, width]."""
    runs = codes.reshape(len(codes), -1, 1, width)
    shift = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=codes.device).view(-1, 1)
    return ((runs >> shift) & (2**bits - 1)).flatten(1, 2)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes to 8 scales and 8 minima of six bits, [n, 8, 1] float32 each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((a & 63, c & 15 | a >> 2 & 48), dim=1)
    minima = torch.cat((b & 63, c >> 4 | b >> 2 & 48), dim=1)
    return scales.float()[..., None], minima.float()[..., None]


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 16, 4, 2).flatten(1).float() - 8)


def _q5_0(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, 6:], 16, 4, 2).flatten(1)
    fifth = _fields(blocks[:, 2:6], 1, 1, 8).flatten(1)
    return _half(blocks, 0) * ((low | fifth << 4).float() - 16)


def _gguf_mxfp4(blocks: Tensor) -> Tensor:
    e = blocks[:, :1].int()
    half = torch.where(e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    twice = (
        (torch.tensor(E2M1, device=blocks.device) * 2).int().float()
    )  # ggml has no negative zero
    return half * twice[_fields(blocks[:, 1:], 16, 4, 2).flatten(1).int()]


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _fields(blocks[:, 16:], 32, 4, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 48:], 32, 4, 2), _fields(blocks[:, 16:48], 32, 1, 8)
    return _with_minima(blocks, low | high << 4)


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Expand codes [n, 8, 32] of blocks that begin with d, dmin, scales and minima."""
    scales, minima = _six_bits(blocks[:, 4:16])
    d, dmin = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (d * scales) * codes.float() - dmin * minima


def _q6_k(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, :128], 64, 4, 2).reshape(len(blocks), 16, 16)
    high = _fields(blocks[:, 128:192], 32, 2, 4).reshape(len(blocks), 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    d = (_half(blocks, 208) * scales)[..., None]
    return d * ((low | high << 4).float() - 32)


def _encoding(name: str, blocks: Callable[[Tensor], Tensor]) -> Encoding:
    nbytes = BLOCKS[name][1]
    return Encoding(name, lambda codes: blocks(codes.reshape(-1, nbytes)))


_OF = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "gguf_mxfp4": _gguf_mxfp4,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
ENCODINGS = tuple(_encoding(name, blocks) for name, blocks in _OF.items())
