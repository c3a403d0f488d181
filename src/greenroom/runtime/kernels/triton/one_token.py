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
    RUNS,
    exponent,
    four_halves,
    integer,
    load_packed,
    load_scales,
    load_two_scales,
    run_code,
    small_float,
    surplus,
)
from greenroom.runtime.kernels.triton.iq4 import look_up
from greenroom.runtime.kernels.triton.programs import OTHER_UNITS, finish
from greenroom.runtime.kernels.triton.runs import load_runs

WIDTH, WARPS = 32, 8  # chunks of a row that are loaded at a time; one for each lane of a warp
# Rows of weights that a program multiplies: half of them are the gate's, if there is one. Formats
# with many numbers for a word have fewer, so that two programs fit on a multiprocessor.
ROWS = 64
ROWS_OF = {
    **dict.fromkeys(("int4", "symmetric4", "affine4", "q4_0"), 32),
    **dict.fromkeys(("iq4_nl", "iq4_xs", *RUNS), 32),
}


@triton.jit
def _four_inputs(x, inside, KIND: tl.constexpr, FACTOR: tl.constexpr):
    """Load four neighbouring inputs for each pointer to 64 bits, times a factor: 4 [1, C, 4]."""
    four = tl.load(x, mask=inside, other=0)
    if tl.bfloat16 == KIND:
        low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
        a = (low << 16).to(tl.float32, bitcast=True)
        b = (low & -65536).to(tl.float32, bitcast=True)
        c = (high << 16).to(tl.float32, bitcast=True)
        d = (high & -65536).to(tl.float32, bitcast=True)
    else:
        a, b, c, d = four_halves(four)
    if FACTOR != 1:
        a, b, c, d = a * FACTOR, b * FACTOR, c * FACTOR, d * FACTOR
    return a[None], b[None], c[None], d[None]


@triton.jit
def _inputs(x, k, inside, KIND: tl.constexpr, ENCODING: tl.constexpr, CHUNK: tl.constexpr,
            RUNS: tl.constexpr):  # fmt: skip
    """Load the inputs of chunks k [C]: 8 [1, C, 4], for the codes of a word; of 8 bits the same 4.

    Of fp8 they are the inputs of each word: 4 times 4 [1, C].

    `x` points to the inputs, 64 bits at a time. Inputs of float codes are multiplied by a power of
    two, so that products are not too small.
    """
    word, mask = tl.arange(0, 4)[None, :], inside[:, None]
    if ENCODING == "fp8":  # word by word
        at = x + k * 4
        a = _four_inputs(at, inside, KIND, E4M3_HALF)
        b = _four_inputs(at + 1, inside, KIND, E4M3_HALF)
        c = _four_inputs(at + 2, inside, KIND, E4M3_HALF)
        d = _four_inputs(at + 3, inside, KIND, E4M3_HALF)
        e, f, g, h = a, b, c, d
    elif CHUNK == 16:
        a, b, c, d = _four_inputs(x + (k[:, None] * 4 + word), mask, KIND, 1)
        e, f, g, h = a, b, c, d
    elif RUNS[0] > 0:
        STRIDE: tl.constexpr = RUNS[1]
        at = x + ((k // STRIDE * STRIDE * 8 + k % STRIDE * 4)[:, None] + word)
        a, b, c, d = _four_inputs(at, mask, KIND, 1)
        e, f, g, h = _four_inputs(at + STRIDE * 4, mask, KIND, 1)
    elif (
        ENCODING == "q4_0" or ENCODING == "gguf_mxfp4" or ENCODING == "iq4_nl"
        or ENCODING == "iq4_xs"
    ):  # fmt: skip
        HALF: tl.constexpr = E2M1_HALF if ENCODING == "gguf_mxfp4" else 1
        at = x + (k[:, None] * 8 + word)
        a, c, e, g = _four_inputs(at, mask, KIND, HALF)
        b, d, f, h = _four_inputs(at + 4, mask, KIND, HALF)
    else:
        FLOATS: tl.constexpr = ENCODING == "mxfp4" or ENCODING == "nvfp4" or ENCODING == "ct_nvfp4"
        FACTOR: tl.constexpr = E2M1_HALF if FLOATS else 1
        at = x + (k[:, None] * 8 + word * 2)
        a, b, c, d = _four_inputs(at, mask, KIND, FACTOR)
        e, f, g, h = _four_inputs(at + 1, mask, KIND, FACTOR)
    return a, b, c, d, e, f, g, h


@triton.jit
def _in_order(packed, flip, more, a, b, c, d, e, f, g, h, ENCODING: tl.constexpr):
    """Sum the codes of words [N, C, 4], from the lowest bits up, times inputs [1, C, 4].

    The power of two of float codes is left out.
    """
    if (
        ENCODING == "int4" or ENCODING == "q4_0" or ENCODING == "symmetric4"
        or ENCODING == "affine4"
    ):  # fmt: skip
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
    elif ENCODING == "iq4_nl" or ENCODING == "iq4_xs":
        first, second = look_up(packed)
        p = ((a + b) + (c + d) + ((e + f) + (g + h))) * -more
        p += integer(first, flip, 7, EIGHT) * a
        p += integer(first, flip, 15, EIGHT) * b
        p += integer(first, flip, 23, EIGHT) * c
        p += integer(first, flip, 31, EIGHT) * d
        p += integer(second, flip, 7, EIGHT) * e
        p += integer(second, flip, 15, EIGHT) * f
        p += integer(second, flip, 23, EIGHT) * g
        p += integer(second, flip, 31, EIGHT) * h
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
def _in_run(run, flip, a, b, c, d, BIT: tl.constexpr, RUNS: tl.constexpr):
    """Multiply a run's codes with its inputs: [N, C, 4]."""
    packed, _, _ = run
    HAS_MINIMA: tl.constexpr = RUNS[2] == 1 << RUNS[0]
    p = run_code(packed, flip, BIT, RUNS) * a
    if not HAS_MINIMA:  # what codes have too much is subtracted before the scale is applied
        p += ((a + b) + (c + d)) * -RUNS[2]
    p += run_code(packed, flip, BIT + 8, RUNS) * b
    p += run_code(packed, flip, BIT + 16, RUNS) * c
    p += run_code(packed, flip, BIT + 24, RUNS) * d
    return p


@triton.jit
def _in_runs(first, second, flip, a, b, c, d, e, f, g, h, RUNS: tl.constexpr):
    """Multiply two runs of chunks with their inputs: [N, C].

    Products are summed in pairs of words, since some GPUs multiply pairs.
    """
    _, low, low_least = first
    _, high, high_least = second
    q = _in_run(first, flip, a, b, c, d, 0, RUNS)
    r = _in_run(second, flip, e, f, g, h, RUNS[3], RUNS)
    HAS_MINIMA: tl.constexpr = RUNS[2] == 1 << RUNS[0]
    if not HAS_MINIMA:
        total = tl.sum(q, axis=2) * low + tl.sum(r, axis=2) * high
    else:
        low_least, high_least = -low_least - low * RUNS[2], -high_least - high * RUNS[2]
        p = ((a + b) + (c + d)) * low_least[:, :, None]
        p += ((e + f) + (g + h)) * high_least[:, :, None]
        p += q * low[:, :, None]
        p += r * high[:, :, None]
        total = tl.sum(p, axis=2)
    return total


@triton.jit
def _split_fours(x):
    """Split [n, C, 4] into 4 [n, C]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _fp8_word(p, word, inputs, BEGIN: tl.constexpr = False):
    """Add the codes of words [N, C] times their four inputs [1, C], but the power of two.

    BEGIN: there is no sum yet
    """
    a, b, c, d = inputs
    first = small_float(word, 7, E4M3) * a
    p = first if BEGIN else p + first
    p += small_float(word, 15, E4M3) * b
    p += small_float(word, 23, E4M3) * c
    return p + small_float(word, 31, E4M3) * d


@triton.jit
def _in_fp8(packed, a, b, c, d):
    """Sum the codes of four words [N, C, 4] times the inputs of each: [N, C].

    One sum is continued from word to word: four of them would have to be added.
    """
    first, second, third, fourth = _split_fours(packed)
    p = _fp8_word(None, first, a, BEGIN=True)
    p = _fp8_word(p, second, b)
    p = _fp8_word(p, third, c)
    return _fp8_word(p, fourth, d)


@triton.jit
def _odd_codes(packed):
    """Return words [N, C] with the top bit of a byte set if one of e4m3's codes is no number.

    Adding 1 to 0x7F or 0xFF changes a byte's top bit. It carries into the next byte only from 0xFF.
    """
    first, second, third, fourth = _split_fours(packed ^ (packed + 0x01010101))
    return first | second | third | fourth


@triton.jit
def _scale_rows(row, scale_n, span_n, ENCODING: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Return where the scales of rows [N] begin: [N, 1], or [1, 1] if all have the same."""
    begin = row // (span_n if ENCODING == "fp8" else 1) * scale_n
    if ONE_SCALE:
        begin = tl.min(begin, 0, keep_dims=True)
    return begin[:, None]


@triton.jit
def _row_sums(p, odd, others, row, span_n, ENCODING: tl.constexpr):
    """Sum the chunks [N, C] of rows, times the scales of matrices: [N].

    Rows with codes that are no numbers are NaN; `odd` are the words of `_odd_codes`.
    """
    total = tl.sum(p, axis=1)
    if ENCODING == "fp8":
        has_odd = tl.max((odd & -0x7F7F7F80 != 0).to(tl.int32), axis=1)
        total = tl.where(has_odd != 0, float("nan"), total)
    elif ENCODING == "nvfp4":
        total *= tl.load(others + row // span_n)
    elif ENCODING == "ct_nvfp4":
        total /= tl.load(others + row // span_n)
    return total


@triton.jit
def _chunks(
    codes, scales, others, row, span_n, k, flip, a, b, c, d, e, f, g, h,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Multiply chunks k [C] of rows with their inputs: [N, C], and the words of `_odd_codes`."""
    odd = tl.zeros((1, 1), tl.int32)
    if RUNS[0] > 0:
        first, second = load_runs(codes, scales, others, row, span_n, k, ENCODING)
        p = _in_runs(first, second, flip, a, b, c, d, e, f, g, h, RUNS)
    else:
        more = surplus(others, row, k, ENCODING, GROUP, CHUNK)
        packed = load_packed(codes, k)
        if ENCODING == "fp8":
            p, odd = _in_fp8(packed, a, b, c, d), _odd_codes(packed)
        else:
            p = _in_order(packed, flip, more, a, b, c, d, e, f, g, h, ENCODING)
        if ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
            low, high = tl.split(tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], 2, 2)), axis=3))
            first, second = load_two_scales(scales, row, k)
            p = (low * first + high * second) * E2M1_HALF
        else:
            s = load_scales(scales, row, k, ENCODING, GROUP, CHUNK)
            if ENCODING == "fp8":
                p = p * (s * E4M3_HALF)
            elif ENCODING == "mxfp4" or ENCODING == "gguf_mxfp4":
                p = tl.sum(p, axis=2) * (s * E2M1_HALF)
            else:
                p = tl.sum(p, axis=2) * s
    return p, odd


@triton.jit
def project_one(
    x, tiles, tokens, codes, scales, others, bias, out,
    inputs, outputs, code_at, scale_at, other_at, row_n, scale_n, span_n, limit, alpha,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr,
    GATHERED: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SEGMENT: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, CODE_UNITS: tl.constexpr,
    SCALE_UNITS: tl.constexpr, ONE_SCALE: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of tiles of one entry with their experts' matrices, in Triton.

    The parameters are those of `project`.

    GROUP: inputs that share a scale
    CHUNK: weights in 16 bytes of codes
    RUNS:  of GGUF types, as in chunks.py
    ONE_SCALE: whether all rows of a program, of fp8, have the same scales
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
    up_scale = _scale_rows(up_row, scale_n, span_n, ENCODING, ONE_SCALE)
    gate_scale = _scale_rows(gate_row, scale_n, span_n, ENCODING, ONE_SCALE)
    flip = exponent(ENCODING, RUNS)
    up_codes = (codes + up_row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    gate_codes = (codes + gate_row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    g, u = tl.zeros((N, C), tl.float32), tl.zeros((N, C), tl.float32)
    odd_g, odd_u = tl.zeros((N, C), tl.int32), tl.zeros((N, C), tl.int32)
    chunks = inputs // CHUNK
    for first in range(0, tl.where(count > 0, chunks, 0), C):
        at = first + tl.arange(0, C)
        k, inside = tl.minimum(at, chunks - 1), at < chunks
        a, b, c, d, e, f, h, i = _inputs(fours, k, inside, KIND, ENCODING, CHUNK, RUNS)
        if GATED:
            p, odd = _chunks(gate_codes, scales, others, gate_scale, span_n, k, flip, a, b, c, d,
                             e, f, h, i, ENCODING, GROUP, CHUNK, RUNS)  # fmt: skip
            g += p
            odd_g |= odd
        p, odd = _chunks(up_codes, scales, others, up_scale, span_n, k, flip, a, b, c, d,
                         e, f, h, i, ENCODING, GROUP, CHUNK, RUNS)  # fmt: skip
        u += p
        odd_u |= odd
    gate = _row_sums(g, odd_g, others, gate_row, span_n, ENCODING)[None, :]
    total = _row_sums(u, odd_u, others, up_row, span_n, ENCODING)[None, :]
    if SEGMENT == 2:
        total += tl.load(out + entry * outputs + n, mask=n < outputs, other=0.0)[None, :]
    finish(gate, total, bias, out, entry + tl.arange(0, 1), n,
           n * 2 if INTERLEAVED else n, (n * 2 + 1 if INTERLEAVED else n + outputs) if GATED else n,
           (n < outputs * count)[None, :], expert, outputs, limit, alpha, KIND, GATED, ACTIVATION,
           BIAS, SEGMENT)  # fmt: skip
