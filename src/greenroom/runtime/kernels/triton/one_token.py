"""The Triton program for steps in which every expert has one entry, such as those of one token.

It multiplies without tensor cores, which would have 15 of 16 rows empty. A lane loads 16 bytes of
codes of a row at a time (a *chunk*), and multiplies its codes with inputs as they come out of the
bytes, a scale is applied once to the sum of a group. Weights are not rounded to the model's type:
sums are those of the encoding's values in float32.

A code becomes a float32 without a conversion. An integer code is shifted to the top of a mantissa,
below a constant exponent; the constant that this adds is subtracted with the sum of the inputs. A
small float is shifted so that its exponent and mantissa are those of a float32, whose exponent is
too small by a constant; inputs are multiplied by a power of two before, and sums after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.expand import e4m3, e8m0
from greenroom.runtime.kernels.triton.programs import OTHER_UNITS, finish

# Weights in a chunk, of the encodings that the program reads.
CHUNKS = {
    **dict.fromkeys(("int4", "mxfp4", "nvfp4", "ct_nvfp4", "q4_k"), 32),
    **dict.fromkeys(("int8", "fp8"), 16),
}
WIDTH, WARPS = 32, 8  # chunks of a row that are loaded at a time; one for each lane of a warp
ROWS = 64  # rows of weights that a program multiplies: half of them are the gate's, if there is one

# Of float codes: masks of sign, exponent and mantissa within a float32.
_E2M1 = tl.constexpr(0x81C00000 - (1 << 32))
_E4M3 = tl.constexpr(0x87F00000 - (1 << 32))
# Of integer codes: masks of mantissas, and what is exclusive-ored with a code: an exponent, and
# the sign of int8.
_FOUR, _EIGHT = tl.constexpr(0x00780000), tl.constexpr(0x007F8000)
_SIXTEEN, _SIGNED = tl.constexpr(0x41800000), tl.constexpr(0x43C00000)
# The inputs' power of two, and that of the sums: 2^126 of e2m1 and 2^120 of e4m3 in two halves.
_E2M1_HALF, _E4M3_HALF = tl.constexpr(2.0**63), tl.constexpr(2.0**60)


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _inputs(x, inside, KIND: tl.constexpr, FACTOR: tl.constexpr):
    """Load four neighbouring inputs for each pointer to 64 bits, times a factor: 4 [1, C, 4]."""
    four = tl.load(x, mask=inside, other=0)
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    if KIND == tl.bfloat16:
        a, b = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
        c, d = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(
            tl.float32, bitcast=True
        )
    else:
        a, b, c, d = _half(low), _half(low >> 16), _half(high), _half(high >> 16)
    if FACTOR != 1:
        a, b, c, d = a * FACTOR, b * FACTOR, c * FACTOR, d * FACTOR
    return a[None], b[None], c[None], d[None]


@triton.jit
def _integer(words, flip, BIT: tl.constexpr, MASK: tl.constexpr):
    """Take the integer codes whose highest bit is BIT of the words, as float32."""
    if BIT > 22:
        moved = words >> (BIT - 22)
    else:
        moved = words << (22 - BIT)
    return ((moved & MASK) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def _float(words, BIT: tl.constexpr, MASK: tl.constexpr):
    """Take the float codes whose sign is BIT of the words, as float32 times a power of two."""
    top = words << (31 - BIT)
    return ((top >> (6 if MASK == _E2M1 else 4)) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def _integers_of_4(words, flip, a, b, c, d, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Sum four codes of 4 bits times inputs: [N, C, 4].

    FIRST and STEP: highest bit of the first code, and from there to the next.
    """
    p = _integer(words, flip, FIRST, _FOUR) * a
    p += _integer(words, flip, FIRST + STEP, _FOUR) * b
    p += _integer(words, flip, FIRST + 2 * STEP, _FOUR) * c
    return p + _integer(words, flip, FIRST + 3 * STEP, _FOUR) * d


@triton.jit
def _chunk_of_4(codes, k, flip, a, b, c, d, e, f, g, h, ENCODING: tl.constexpr):
    """Sum the codes of chunks of 32 weights in order, times inputs: [N, C, 4] by words."""
    words = tl.load(codes + (k[:, None] * 4 + tl.arange(0, 4)[None, :])[None])
    if ENCODING == "int4":
        # Of a code, 8 is part of the format, and 16 of the float32.
        p = ((a + b) + (c + d) + ((e + f) + (g + h))) * -24.0
        p = p + _integers_of_4(words, flip, a, b, c, d, 3, 4)
        p = p + _integers_of_4(words, flip, e, f, g, h, 19, 4)
    else:
        p = _float(words, 3, _E2M1) * a
        p += _float(words, 7, _E2M1) * b
        p += _float(words, 11, _E2M1) * c
        p += _float(words, 15, _E2M1) * d
        p += _float(words, 19, _E2M1) * e
        p += _float(words, 23, _E2M1) * f
        p += _float(words, 27, _E2M1) * g
        p += _float(words, 31, _E2M1) * h
    return p


@triton.jit
def _chunk_of_8(codes, k, flip, a, b, c, d, ENCODING: tl.constexpr):
    """Sum the codes of chunks of 16 weights, times inputs: [N, C, 4] by words."""
    words = tl.load(codes + (k[:, None] * 4 + tl.arange(0, 4)[None, :])[None])
    if ENCODING == "int8":
        # Of a code, 128 undoes that its sign was changed, and 256 is part of the float32.
        p = ((a + b) + (c + d)) * -384.0
        p = p + _integer(words, flip, 7, _EIGHT) * a
        p += _integer(words, flip, 15, _EIGHT) * b
        p += _integer(words, flip, 23, _EIGHT) * c
        p += _integer(words, flip, 31, _EIGHT) * d
    else:
        p = _float(words, 7, _E4M3) * a
        p += _float(words, 15, _E4M3) * b
        p += _float(words, 23, _E4M3) * c
        p += _float(words, 31, _E4M3) * d
    return p


@triton.jit
def _scales(scales, row, k, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Load the scales of chunks [N, C], as float32."""
    # The compiler must not see that scales are consecutive: it would give a lane several, and
    # exchange them with other lanes through shared memory.
    if ENCODING == "mxfp4":  # 16 bits are two scales
        pairs = scales.to(tl.pointer_type(tl.int16))
        pair = tl.load(pairs + tl.max_contiguous(row // 2 + (k // 2)[None, :], (1, 1)))
        s = e8m0((pair.to(tl.int32) >> (k % 2 * 8)[None, :]) & 255) * _E2M1_HALF
    else:
        s = tl.load(scales + tl.max_contiguous(row + (k * CHUNK // GROUP)[None, :], (1, 1)))
        s = s.to(tl.float32)
    if ENCODING == "fp8":
        s = s * _E4M3_HALF
    return s


@triton.jit
def _words(codes, row, row_n):
    """Return pointers to rows of codes, as words: [N, 1, 1]."""
    return (codes + row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]


@triton.jit
def _q4_k(codes, x, k, inside, flip, KIND: tl.constexpr):
    """Multiply chunks of q4_k with their inputs: [N, C].

    A block has 36 words: both scales as float16, 12 bytes of the groups' scales and minima, and
    32 words of codes. A chunk has 16 codes of one group of 32 weights in its low halves of bytes,
    and 16 of the next group in the high ones.
    """
    word, pair, mask = tl.arange(0, 4), k % 8 // 2, inside[:, None]
    at = k // 8 * 64 + pair * 16 + k % 2 * 4  # in units of four inputs
    a, b, c, d = _inputs(x + (at[:, None] + word[None, :]), mask, KIND, 1)
    e, f, g, h = _inputs(x + (at[:, None] + 8 + word[None, :]), mask, KIND, 1)
    first = tl.max_contiguous(k // 8 * 36, 1)
    place = first + 4 + k % 8 * 4
    words = tl.load(codes + (place[:, None] + word[None, :])[None])
    head = tl.max_contiguous(tl.reshape(codes, (codes.shape[0], 1)) + first[None, :], (1, 1))
    halves, one, two, three = (
        tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    )  # fmt: skip
    # Bytes 2 * pair and 2 * pair + 1 of eight: the groups' six bits.
    shift, early = (pair % 2 * 16)[None, :], (pair < 2)[None, :]
    one, two, three = one >> shift, two >> shift, three >> shift
    scale = tl.where(early, one & 0x3F3F, (three & 0x0F0F) | ((one >> 2) & 0x3030))
    least = tl.where(early, two & 0x3F3F, ((three >> 4) & 0x0F0F) | ((two >> 2) & 0x3030))
    both, minimum = _half(halves), -_half(halves >> 16)
    low = both * (scale & 63).to(tl.float32)
    high = both * (scale >> 8).to(tl.float32)
    # Of a code, 16 is part of the float32.
    low_least = minimum * (least & 63).to(tl.float32) - 16.0 * low
    high_least = minimum * (least >> 8).to(tl.float32) - 16.0 * high
    p = ((a + b) + (c + d)) * low_least[:, :, None] + ((e + f) + (g + h)) * high_least[:, :, None]
    p += _integers_of_4(words, flip, a, b, c, d, 3, 8) * low[:, :, None]
    p += _integers_of_4(words, flip, e, f, g, h, 7, 8) * high[:, :, None]
    return tl.sum(p, axis=2)


@triton.jit
def _words(codes, row, row_n):
    """Return pointers to rows of codes, as words: [N, 1, 1]."""
    return (codes + row * row_n).to(tl.pointer_type(tl.int32))[:, None, None]


@triton.jit
def _q4_k(codes, k, flip, a, b, c, d, e, f, g, h):
    """Multiply chunks of q4_k with their inputs: [N, C].

    A block has 36 words: both scales as float16, 12 bytes of the groups' scales and minima, and
    32 words of codes. A chunk has 16 codes of one group of 32 weights in its low halves of bytes,
    and 16 of the next group in the high ones.
    """
    word, pair = tl.arange(0, 4), k % 8 // 2
    first = tl.max_contiguous(k // 8 * 36, 1)
    place = first + 4 + k % 8 * 4
    words = tl.load(codes + (place[:, None] + word[None, :])[None])
    head = tl.max_contiguous(tl.reshape(codes, (codes.shape[0], 1)) + first[None, :], (1, 1))
    halves, one, two, three = (
        tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    )  # fmt: skip
    # Bytes 2 * pair and 2 * pair + 1 of eight: the groups' six bits.
    shift, early = (pair % 2 * 16)[None, :], (pair < 2)[None, :]
    one, two, three = one >> shift, two >> shift, three >> shift
    scale = tl.where(early, one & 0x3F3F, (three & 0x0F0F) | ((one >> 2) & 0x3030))
    least = tl.where(early, two & 0x3F3F, ((three >> 4) & 0x0F0F) | ((two >> 2) & 0x3030))
    both, minimum = _half(halves), -_half(halves >> 16)
    low = both * (scale & 63).to(tl.float32)
    high = both * (scale >> 8).to(tl.float32)
    # Of a code, 16 is part of the float32.
    low_least = minimum * (least & 63).to(tl.float32) - 16.0 * low
    high_least = minimum * (least >> 8).to(tl.float32) - 16.0 * high
    p = ((a + b) + (c + d)) * low_least[:, :, None] + ((e + f) + (g + h)) * high_least[:, :, None]
    p += _integers_of_4(words, flip, a, b, c, d, 3, 8) * low[:, :, None]
    p += _integers_of_4(words, flip, e, f, g, h, 7, 8) * high[:, :, None]
    return tl.sum(p, axis=2)


@triton.jit
def _chunks(
    codes, scales, x, row, k, inside, flip,
    KIND: tl.constexpr, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply chunks k [C] of rows with their inputs: [N, C]."""
    if ENCODING == "q4_k":
        p = _q4_k(codes, x, k, inside, flip, KIND)
    elif ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
        p = _chunk_of_4(codes, x, k, inside, flip, KIND, ENCODING)
        low, high = tl.split(tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], 2, 2)), axis=3))
        pairs = scales.to(tl.pointer_type(tl.int16))
        pair = tl.load(pairs + tl.max_contiguous(row // 2 + k[None, :], (1, 1))).to(tl.int32)
        p = (low * e4m3(pair & 255) + high * e4m3((pair >> 8) & 255)) * _E2M1_HALF
    else:
        if CHUNK == 32:
            p = _chunk_of_4(codes, x, k, inside, flip, KIND, ENCODING)
        else:
            p = _chunk_of_8(codes, x, k, inside, flip, KIND, ENCODING)
        p = tl.sum(p, axis=2) * _scales(scales, row, k, ENCODING, GROUP, CHUNK)
    return p


@triton.jit
def _chunk_inputs(x, k, inside, KIND: tl.constexpr, ENCODING: tl.constexpr):
    """Load the inputs of chunks k [C]: 8 [1, C, 4], for the codes of a word; of 8 bits the same 4.

    `x` points to the inputs, 64 bits at a time.
    """
    word, mask = tl.arange(0, 4)[None, :], inside[:, None]
    if ENCODING == "int8" or ENCODING == "fp8":
        FACTOR: tl.constexpr = _E4M3_HALF if ENCODING == "fp8" else 1
        a, b, c, d = _inputs(x + (k[:, None] * 4 + word), mask, KIND, FACTOR)
        e, f, g, h = a, b, c, d
    elif ENCODING == "q4_k":
        at = x + ((k // 8 * 64 + k % 8 // 2 * 16 + k % 2 * 4)[:, None] + word)
        a, b, c, d = _inputs(at, mask, KIND, 1)
        e, f, g, h = _inputs(at + 8, mask, KIND, 1)
    else:
        FACTOR: tl.constexpr = 1 if ENCODING == "int4" else _E2M1_HALF
        at = x + (k[:, None] * 8 + word * 2)
        a, b, c, d = _inputs(at, mask, KIND, FACTOR)
        e, f, g, h = _inputs(at + 1, mask, KIND, FACTOR)
    return a, b, c, d, e, f, g, h


@triton.jit
def _chunks(
    codes, scales, row, k, flip, a, b, c, d, e, f, g, h,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply chunks k [C] of rows with their inputs: [N, C]."""
    if ENCODING == "q4_k":
        p = _q4_k(codes, k, flip, a, b, c, d, e, f, g, h)
    elif ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
        p = _chunk_of_4(codes, k, flip, a, b, c, d, e, f, g, h, ENCODING)
        low, high = tl.split(tl.sum(tl.reshape(p, (p.shape[0], p.shape[1], 2, 2)), axis=3))
        pairs = scales.to(tl.pointer_type(tl.int16))
        pair = tl.load(pairs + tl.max_contiguous(row // 2 + k[None, :], (1, 1))).to(tl.int32)
        p = (low * e4m3(pair & 255) + high * e4m3((pair >> 8) & 255)) * _E2M1_HALF
    else:
        if CHUNK == 32:
            p = _chunk_of_4(codes, k, flip, a, b, c, d, e, f, g, h, ENCODING)
        else:
            p = _chunk_of_8(codes, k, flip, a, b, c, d, ENCODING)
        p = tl.sum(p, axis=2) * _scales(scales, row, k, ENCODING, GROUP, CHUNK)
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
    entry = tl.load(tiles + 4 * tile + 2)
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
    # A number that the compiler does not know (0 is exclusive-ored): it keeps such a number in a
    # register, and would move a constant there for each code.
    flip = (_SIGNED if ENCODING == "int8" else _SIXTEEN) ^ tl.program_id(2)
    g, u = tl.zeros((N, C), tl.float32), tl.zeros((N, C), tl.float32)
    chunks = inputs // CHUNK
    for first in range(0, chunks, C):
        at = first + tl.arange(0, C)
        k, inside = tl.minimum(at, chunks - 1), at < chunks
        a, b, c, d, e, f, h, i = _chunk_inputs(fours, k, inside, KIND, ENCODING)
        if GATED:
            g += _chunks(_words(codes, gate_row, row_n), scales, gate_scale, k, flip,
                         a, b, c, d, e, f, h, i, ENCODING, GROUP, CHUNK)  # fmt: skip
        u += _chunks(_words(codes, up_row, row_n), scales, up_scale, k, flip,
                     a, b, c, d, e, f, h, i, ENCODING, GROUP, CHUNK)  # fmt: skip
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
    entries = entry + tl.arange(0, 1)
    finish(gate[None, :], total, bias, out, entries, n, n * 2 if INTERLEAVED else n,
           (n * 2 + 1 if INTERLEAVED else n + outputs) if GATED else n, n[None, :] >= 0, expert,
           outputs, limit, alpha, KIND, GATED, ACTIVATION, BIAS, SEGMENT)  # fmt: skip
