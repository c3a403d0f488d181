"""Triton functions that decode GGUF's block formats (runtime/encodings/ggml/ has the layouts).

Every product of a scale with a code is exact in float32, so only the last addition rounds, with or
without fused multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.iq4 import IQ4

# The encodings of `decode_block`.
BLOCK_ENCODINGS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
)
_IQ4_0, _IQ4_1, _IQ4_2, _IQ4_3 = IQ4


@triton.jit
def _byte(codes, at, mask):
    return tl.load(codes + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _bits(codes, at, shift, count: tl.constexpr, mask):
    return (_byte(codes, at, mask) >> shift) & ((1 << count) - 1)


@triton.jit
def _half(scales, at, mask):
    return tl.load(scales + at // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _iq4_value(code):
    """Look up the value of a 4-bit code of iq4_nl and iq4_xs."""
    high = tl.where(code < 12, _IQ4_2, _IQ4_3)
    four = tl.where(code < 8, tl.where(code < 4, _IQ4_0, _IQ4_1), high)
    return (((four >> (code % 4 * 8)) & 255) ^ 128) - 128


@triton.jit
def _block_of_32(codes, scales, row, k, mask, ENCODING: tl.constexpr):
    """Decode weights of blocks of 32; rows begin at the bytes `row`."""
    i = k % 32
    if ENCODING == "q8_0":
        block = row + k // 32 * 34
        w = _half(scales, block, mask) * _byte(codes, block + 2 + i, mask).to(tl.int8).to(
            tl.float32
        )
    elif ENCODING == "iq4_nl":
        block = row + k // 32 * 18
        w = _half(scales, block, mask) * _iq4_value(_four_bits(codes, block + 2, i, mask)).to(
            tl.float32
        )
    elif ENCODING == "q4_0":
        block = row + k // 32 * 18
        w = _half(scales, block, mask) * (_four_bits(codes, block + 2, i, mask) - 8).to(tl.float32)
    elif ENCODING == "q4_1":
        block = row + k // 32 * 20
        code = _four_bits(codes, block + 4, i, mask).to(tl.float32)
        w = _half(scales, block, mask) * code + _half(scales, block + 2, mask)
    elif ENCODING == "q5_0":
        block = row + k // 32 * 22
        w = _half(scales, block, mask) * (_five_bits(codes, block + 2, i, mask) - 16).to(tl.float32)
    else:  # q5_1
        block = row + k // 32 * 24
        code = _five_bits(codes, block + 4, i, mask).to(tl.float32)
        w = _half(scales, block, mask) * code + _half(scales, block + 2, mask)
    return w


@triton.jit
def _four_bits(codes, at, i, mask):
    """Load codes i, of which 16 bytes have i and i + 16 each."""
    return _bits(codes, at + i % 16, i // 16 * 4, 4, mask)


@triton.jit
def _five_bits(codes, at, i, mask):
    """Load codes i of 4 bytes of fifth bits, and 16 bytes as those of `_four_bits`."""
    fifth = _bits(codes, at + i // 8, i % 8, 1, mask)
    return _four_bits(codes, at + 4, i, mask) | (fifth << 4)


@triton.jit
def _super_block(codes, scales, row, k, mask, ENCODING: tl.constexpr):
    """Decode weights of blocks of 256; rows begin at the bytes `row`."""
    i = k % 256
    if ENCODING == "q2_k":
        block = row + k // 256 * 84
        both = _byte(codes, block + i // 16, mask)
        scale = _half(scales, block + 80, mask) * (both & 15).to(tl.float32)
        low = _half(scales, block + 82, mask) * (both >> 4).to(tl.float32)
        w = scale * _two_bits(codes, block + 16, i, mask).to(tl.float32) - low
    elif ENCODING == "q3_k":
        block = row + k // 256 * 110
        third = _bits(codes, block + i % 32, i // 32, 1, mask)
        code = (_two_bits(codes, block + 32, i, mask) | (third << 2)) - 4
        low = _bits(codes, block + 96 + i // 16 % 8, i // 128 * 4, 4, mask)
        high = _bits(codes, block + 104 + i // 16 % 4, i // 64 * 2, 2, mask)
        scale = _half(scales, block + 108, mask) * ((low | (high << 4)) - 32).to(tl.float32)
        w = scale * code.to(tl.float32)
    elif ENCODING == "q6_k":
        block = row + k // 256 * 210
        four = _bits(codes, block + i // 128 * 64 + i % 64, i % 128 // 64 * 4, 4, mask)
        code = (four | (_two_bits(codes, block + 128, i, mask) << 4)) - 32
        scale = _byte(codes, block + 192 + i // 16, mask).to(tl.int8).to(tl.float32)
        w = _half(scales, block + 208, mask) * scale * code.to(tl.float32)
    elif ENCODING == "iq4_xs":
        block = row + k // 256 * 136
        j = i // 32
        code = _four_bits(codes, block + 8 + j * 16, i % 32, mask)
        low = _bits(codes, block + 4 + j // 2, j % 2 * 4, 4, mask)
        high = _bits(codes, block + 2 + j // 4, j % 4 * 2, 2, mask)
        scale = _half(scales, block, mask) * ((low | (high << 4)) - 32).to(tl.float32)
        w = scale * _iq4_value(code).to(tl.float32)
    elif ENCODING == "q5_k":
        block = row + k // 256 * 176
        fifth = _bits(codes, block + 16 + i % 32, i // 32, 1, mask)
        code = _halves_of_32(codes, block + 48, i, mask) | (fifth << 4)
        w = _with_minima(codes, scales, block, i // 32, code, mask)
    else:  # q4_k
        block = row + k // 256 * 144
        code = _halves_of_32(codes, block + 16, i, mask)
        w = _with_minima(codes, scales, block, i // 32, code, mask)
    return w


@triton.jit
def _two_bits(codes, at, i, mask):
    """Load codes i, of which 32 bytes have i, i + 32, i + 64 and i + 96 each."""
    return _bits(codes, at + i // 128 * 32 + i % 32, i % 128 // 32 * 2, 2, mask)


@triton.jit
def _halves_of_32(codes, at, i, mask):
    """Load codes i, of which 32 bytes have i and i + 32 each."""
    return _bits(codes, at + i // 64 * 32 + i % 32, i // 32 % 2 * 4, 4, mask)


@triton.jit
def _with_minima(codes, scales, block, j, code, mask):
    """Decode codes of group j of a block that begins as those of q4_k and q5_k do."""
    first = _byte(codes, block + 4 + j % 4, mask)
    second = _byte(codes, block + 8 + j % 4, mask)
    third = _byte(codes, block + 12 + j % 4, mask)
    scale = tl.where(j < 4, first & 63, (third & 15) | (first >> 6 << 4)).to(tl.float32)
    minimum = tl.where(j < 4, second & 63, (third >> 4) | (second >> 6 << 4)).to(tl.float32)
    low = _half(scales, block + 2, mask) * minimum
    return _half(scales, block, mask) * scale * code.to(tl.float32) - low


@triton.jit
def decode_block(codes, scales, row, k, mask, ENCODING: tl.constexpr):
    """Decode a tile of weights in one of BLOCK_ENCODINGS, as float32.

    Rows begin at the bytes `row`. The other parameters are those of `expand`.
    """
    if (
        ENCODING == "q8_0" or ENCODING == "q4_0" or ENCODING == "q4_1" or ENCODING == "q5_0"
        or ENCODING == "q5_1" or ENCODING == "iq4_nl"
    ):  # fmt: skip
        w = _block_of_32(codes, scales, row, k, mask, ENCODING)
    else:
        w = _super_block(codes, scales, row, k, mask, ENCODING)
    return w
