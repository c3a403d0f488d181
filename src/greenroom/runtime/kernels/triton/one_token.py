"""The Triton program for experts that have one entry each, as of one token.

It multiplies without tensor cores, which would have 15 of 16 rows empty. A lane loads a chunk of a
row's codes at a time, and multiplies the codes with inputs as they come out of the bytes. A scale
is applied once to the sum of a group, and so is what float32 codes have too much. Weights are not
rounded to the model's type: sums are those of the encoding's values in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.chunks import (
    E2M1,
    E2M1_HALF,
    E4M3,
    E4M3_HALF,
    EIGHT,
    FOUR,
    exponent,
    half,
    integer,
    k_code,
    load_k_block,
    load_packed,
    load_scales,
    load_two_scales,
    small_float,
    surplus,
)
from greenroom.runtime.kernels.triton.programs import OTHER_UNITS, finish

WIDTH, WARPS = 32, 8  # chunks of a row that are loaded at a time; one for each lane of a warp
# Rows of weights that a program multiplies: half of them are the gate's, if there is one. Formats
# with many numbers for a block have fewer, so that two programs fit on a multiprocessor.
ROWS, ROWS_OF = 64, {"q4_k": 32, "q5_k": 32}


@triton.jit
def _four_inputs(x, inside, KIND: tl.constexpr, FACTOR: tl.constexpr):
    """Load four neighbouring inputs for each pointer to 64 bits, times a factor: 4 [1, C, 4]."""
    four = tl.load(x, mask=inside, other=0)
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    if tl.bfloat16 == KIND:
        a = (low << 16).to(tl.float32, bitcast=True)
        b = (low & -65536).to(tl.float32, bitcast=True)
        c = (high << 16).to(tl.float32, bitcast=True)
        d = (high & -65536).to(tl.float32, bitcast=True)
    else:
        a, b, c, d = half(low), half(low >> 16), half(high), half(high >> 16)
    if FACTOR != 1:
        a, b, c, d = a * FACTOR, b * FACTOR, c * FACTOR, d * FACTOR
    return a[None], b[None], c[None], d[None]


@triton.jit
def _inputs(x, k, inside, KIND: tl.constexpr, ENCODING: tl.constexpr, CHUNK: tl.constexpr):
    """Load the inputs of chunks k [C]: 8 [1, C, 4], for the codes of a word; of 8 bits the same 4.

    `x` points to the inputs, 64 bits at a time. Inputs of float codes are multiplied by a power of
    two, so that products are not too small.
    """
    word, mask = tl.arange(0, 4)[None, :], inside[:, None]
    if CHUNK == 16:
        FACTOR: tl.constexpr = E4M3_HALF if ENCODING == "fp8" else 1
        a, b, c, d = _four_inputs(x + (k[:, None] * 4 + word), mask, KIND, FACTOR)
        e, f, g, h = a, b, c, d
    elif ENCODING == "q4_k" or ENCODING == "q5_k":
        at = x + ((k // 8 * 64 + k % 8 // 2 * 16 + k % 2 * 4)[:, None] + word)
        a, b, c, d = _four_inputs(at, mask, KIND, 1)
        e, f, g, h = _four_inputs(at + 8, mask, KIND, 1)
    else:
        FLOATS: tl.constexpr = ENCODING == "mxfp4" or ENCODING == "nvfp4" or ENCODING == "ct_nvfp4"
        FACTOR: tl.constexpr = E2M1_HALF if FLOATS else 1
        at = x + (k[:, None] * 8 + word * 2)
        a, b, c, d = _four_inputs(at, mask, KIND, FACTOR)
        e, f, g, h = _four_inputs(at + 1, mask, KIND, FACTOR)
    return a, b, c, d, e, f, g, h


@triton.jit
def _in_order(packed, flip, more, a, b, c, d, e, f, g, h, ENCODING: tl.constexpr):
    """Sum the codes of words [N, C, 4], in order, times inputs, but the power of two of floats."""
    if ENCODING == "int4" or ENCODING == "symmetric4" or ENCODING == "affine4":
        p = ((a + b) + (c + d) + ((e + f) + (g + h))) * -more
        p += integer(packed, flip, 3, FOUR) * a
        p += integer(packed, flip, 7, FOUR) * b
        p += integer(packed, flip, 11, FOUR) * c
        p += integer(packed, flip, 15, FOUR) * d
        p += integer(packed, flip, 19, FOUR) * e
        p += integer(packed, flip, 23, FOUR) * f
        p += integer(packed, flip, 27, FOUR) * g
        p += integer(packed, flip, 31, FOUR) * h
    elif (
        ENCODING == "int8" or ENCODING == "symmetric8" or ENCODING == "affine8"
        or ENCODING == "signed8"
    ):  # fmt: skip
        p = ((a + b) + (c + d)) * -more
        p += integer(packed, flip, 7, EIGHT) * a
        p += integer(packed, flip, 15, EIGHT) * b
        p += integer(packed, flip, 23, EIGHT) * c
        p += integer(packed, flip, 31, EIGHT) * d
    elif ENCODING == "fp8":
        p = small_float(packed, 7, E4M3) * a
        p += small_float(packed, 15, E4M3) * b
        p += small_float(packed, 23, E4M3) * c
        p += small_float(packed, 31, E4M3) * d
    else:
        p = small_float(packed, 3, E2M1) * a
        p += small_float(packed, 7, E2M1) * b
        p += small_float(packed, 11, E2M1) * c
        p += small_float(packed, 15, E2M1) * d
        p += small_float(packed, 19, E2M1) * e
        p += small_float(packed, 23, E2M1) * f
        p += small_float(packed, 27, E2M1) * g
        p += small_float(packed, 31, E2M1) * h
    return p


@triton.jit
def _in_k_blocks(codes, k, flip, a, b, c, d, e, f, g, h, ENCODING: tl.constexpr):
    """Multiply chunks of q4_k or q5_k with their inputs: [N, C]."""
    MORE: tl.constexpr = 32.0 if ENCODING == "q5_k" else 16.0
    packed, l5, h5, low, high, low_least, high_least = load_k_block(codes, k, ENCODING)
    low_least, high_least = -low_least - MORE * low, -high_least - MORE * high
    q = k_code(packed, l5, flip, 3, ENCODING) * a
    q += k_code(packed, l5, flip, 11, ENCODING) * b
    q += k_code(packed, l5, flip, 19, ENCODING) * c
    q += k_code(packed, l5, flip, 27, ENCODING) * d
    r = k_code(packed, h5, flip, 7, ENCODING) * e
    r += k_code(packed, h5, flip, 15, ENCODING) * f
    r += k_code(packed, h5, flip, 23, ENCODING) * g
    r += k_code(packed, h5, flip, 31, ENCODING) * h
    p = ((a + b) + (c + d)) * low_least[:, :, None] + ((e + f) + (g + h)) * high_least[:, :, None]
    p += q * low[:, :, None]
    p += r * high[:, :, None]
    return tl.sum(p, axis=2)


@triton.jit
def _chunks(
    codes, scales, others, row, k, flip, a, b, c, d, e, f, g, h,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply chunks k [C] of rows with their inputs: [N, C]."""
    if ENCODING == "q4_k" or ENCODING == "q5_k":
        p = _in_k_blocks(codes, k, flip, a, b, c, d, e, f, g, h, ENCODING)
    else:
        more = surplus(others, row, k, ENCODING, GROUP, CHUNK)
        p = _in_order(load_packed(codes, k), flip, more, a, b, c, d, e, f, g, h, ENCODING)
        if ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
            low, high = tl.split(tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], 2, 2)), axis=3))
            first, second = load_two_scales(scales, row, k)
            p = (low * first + high * second) * E2M1_HALF
        else:
            s = load_scales(scales, row, k, ENCODING, GROUP, CHUNK)
            if ENCODING == "mxfp4":
                s = s * E2M1_HALF
            elif ENCODING == "fp8":
                s = s * E4M3_HALF
            p = tl.sum(p, axis=2) * s
    return p


@triton.jit
def project_one(
    x, tiles, tokens, codes, scales, others, bias, out,
    inputs, outputs, code_at, scale_at, other_at, row_n, scale_n, span_n, limit, alpha,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, GATHERED: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    CODE_UNITS: tl.constexpr, SCALE_UNITS: tl.constexpr, SEGMENT: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of tiles of one entry with their experts' matrices, in Triton.

    The parameters are those of `project`.

    GROUP: inputs that share a scale
    CHUNK: weights in 16 bytes of codes
    N, C:  rows, and chunks of a row, that are multiplied at a time
    """
    KIND: tl.constexpr = x.dtype.element_ty
    tile, block = tl.program_id(1), tl.program_id(0)
    slot, expert = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    entry, count = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    codes += slot * CODE_UNITS + code_at
    scales += slot * SCALE_UNITS + scale_at
    others += slot * OTHER_UNITS + other_at
    source = tl.load(tokens + entry) if GATHERED else entry
    fours = (x + source * inputs).to(tl.pointer_type(tl.int64))
    n = block * N + tl.arange(0, N)
    row = tl.minimum(n, outputs - 1)  # what is loaded is never outside of the matrix
    up_row = (row * 2 + 1 if INTERLEAVED else row + outputs) if GATED else row
    gate_row = row * 2 if INTERLEAVED else row
    share = span_n if ENCODING == "fp8" else 1  # rows to a row of scales
    up_scale = (up_row // share * scale_n)[:, None]
    gate_scale = (gate_row // share * scale_n)[:, None]
    flip = exponent(ENCODING)
    up_codes = (codes + up_row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    gate_codes = (codes + gate_row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    g, u = tl.zeros((N, C), tl.float32), tl.zeros((N, C), tl.float32)
    chunks = inputs // CHUNK
    for first in range(0, tl.where(count > 0, chunks, 0), C):
        at = first + tl.arange(0, C)
        k, inside = tl.minimum(at, chunks - 1), at < chunks
        a, b, c, d, e, f, h, i = _inputs(fours, k, inside, KIND, ENCODING, CHUNK)
        if GATED:
            g += _chunks(gate_codes, scales, others, gate_scale, k, flip, a, b, c, d,
                         e, f, h, i, ENCODING, GROUP, CHUNK)  # fmt: skip
        u += _chunks(up_codes, scales, others, up_scale, k, flip, a, b, c, d,
                     e, f, h, i, ENCODING, GROUP, CHUNK)  # fmt: skip
    total, gate = tl.sum(u, axis=1), tl.sum(g, axis=1)
    if ENCODING == "nvfp4":
        total *= tl.load(others + up_row // span_n)
        gate *= tl.load(others + gate_row // span_n)
    elif ENCODING == "ct_nvfp4":
        total /= tl.load(others + up_row // span_n)
        gate /= tl.load(others + gate_row // span_n)
    total = total[None, :]
    if SEGMENT == 2:
        total += tl.load(out + entry * outputs + n, mask=n < outputs, other=0.0)[None, :]
    finish(gate[None, :], total, bias, out, entry + tl.arange(0, 1), n,
           n * 2 if INTERLEAVED else n, (n * 2 + 1 if INTERLEAVED else n + outputs) if GATED else n,
           (n < outputs * count)[None, :], expert, outputs, limit, alpha, KIND, GATED, ACTIVATION,
           BIAS, SEGMENT)  # fmt: skip
