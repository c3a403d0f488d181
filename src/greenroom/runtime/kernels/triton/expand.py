"""Triton functions that decode quantised weights to the model's type in registers.

Each function decodes a tile [K, N] of one matrix to float32, exact or rounded once per operation as
the decoder of the same encoding in runtime/encodings does; `expand` rounds the tile to the model's
type. So a tile is bit for bit what that decoder returns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.ggml import BLOCK_ENCODINGS, decode_block

# Encodings that the programs read code by code. The eager kernel computes the others.
ENCODINGS = {
    *("plain", "int8", "int4", "mxfp4", "nvfp4", "ct_nvfp4", "gguf_mxfp4", "fp8"),
    *BLOCK_ENCODINGS,
}


@triton.jit
def _e2m1(nibble):
    """Convert a 4-bit float (1 sign, 2 exponent, 1 mantissa bit) to float32."""
    size = nibble & 7
    normal = ((2 + (size & 1)) * (1 << (size >> 1))).to(tl.float32) * 0.25
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where((nibble & 8) != 0, -value, value)


@triton.jit
def e8m0(byte):
    """Convert e8m0 to float32: 2^(byte - 127); 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """Convert an 8-bit float (1 sign, 4 exponent, 3 mantissa bits) to float32.

    No hardware cast is used, so older devices can too.
    """
    size = byte & 0x7F
    small = size.to(tl.float32) * 0.001953125  # below 2^-6 values are multiples of 2^-9
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, small, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((byte & 0x80) != 0, -value, value)


@triton.jit
def _nibble(codes, at, shift, mask):
    return (tl.load(codes + at, mask=mask, other=0).to(tl.int32) >> shift) & 15


@triton.jit
def expand(
    codes, scales, others, n, k, mask, row_n, row_k, scale_n, span_n, span_k,
    KIND: tl.constexpr, ENCODING: tl.constexpr,
):  # fmt: skip
    """Decode a tile of quantised weights to the model's type, in Triton.

    The tile is [K, N], for the inputs k [K, 1] and the outputs n [1, N] of the matrix.

    codes, scales: pointers to the matrix's codes and scales, in their stored types; for a GGUF type
                   both point to the first block, as bytes and as float16
    others:        pointer to the float32 scales of matrices (nvfp4 only)
    row_n, row_k:  of an unencoded matrix, the strides in elements from one output, or one input, to
                   the next; of an encoded matrix, row_n is the bytes of a row
    scale_n:       number of scales of a row
    span_n, span_k: numbers of outputs and inputs that share a scale of `others`, or of fp8
    """
    if ENCODING == "plain":
        w = tl.load(codes + n * row_n + k * row_k, mask=mask, other=0.0)
    elif (
        ENCODING == "int8" or ENCODING == "int4" or ENCODING == "mxfp4" or ENCODING == "nvfp4"
        or ENCODING == "ct_nvfp4" or ENCODING == "gguf_mxfp4" or ENCODING == "fp8"
    ):  # fmt: skip
        if ENCODING == "int8":
            c = tl.load(codes + n * row_n + k, mask=mask, other=0).to(tl.float32)
            s = tl.load(scales + n * scale_n + k // 64, mask=mask, other=0.0).to(tl.float32)
        elif ENCODING == "int4":
            c = (_nibble(codes, n * row_n + k // 2, (k % 2) * 4, mask) - 8).to(tl.float32)
            s = tl.load(scales + n * scale_n + k // 32, mask=mask, other=0.0).to(tl.float32)
        elif ENCODING == "mxfp4":
            c = _e2m1(_nibble(codes, n * row_n + k // 2, (k % 2) * 4, mask))
            s = e8m0(tl.load(scales + n * scale_n + k // 32, mask=mask, other=0).to(tl.int32))
        elif ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
            c = _e2m1(_nibble(codes, n * row_n + k // 2, (k % 2) * 4, mask))
            s = e4m3(tl.load(scales + n * scale_n + k // 16, mask=mask, other=0).to(tl.int32))
            matrix_scale = tl.load(others + n // span_n + k // span_k, mask=mask, other=1.0)
            s = s * matrix_scale if ENCODING == "nvfp4" else tl.div_rn(s, matrix_scale)
        elif ENCODING == "gguf_mxfp4":
            block = n * row_n + (k // 32) * 17
            c = _e2m1(_nibble(codes, block + 1 + k % 16, (k % 32 // 16) * 4, mask))
            s = e8m0(tl.load(codes + block, mask=mask, other=0).to(tl.int32))
        else:
            c = e4m3(tl.load(codes + n * row_n + k, mask=mask, other=0).to(tl.int32))
            s = tl.load(scales + (n // span_n) * scale_n + k // span_k, mask=mask, other=0.0)
        w = (c * s).to(KIND)
    else:
        w = decode_block(codes, scales, n * row_n, k, mask, ENCODING).to(KIND)
    return w
