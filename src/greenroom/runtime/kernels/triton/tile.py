"""The Triton function that decodes a tile of a matrix for tensor cores.

A tile has the bits that `expand` gives, which reads codes one by one; this one reads chunks.
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
    SIX,
    integer,
    k_code,
    load_k_block,
    load_packed,
    load_q6_k,
    load_scales,
    load_two_scales,
    small_float,
    surplus,
)
from greenroom.runtime.kernels.triton.iq4 import look_up


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """Join eight values of a word in order: [N, C, 4, 2, 2, 2]."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    return tl.join(even, tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def _halves(w):
    """Put the values of the low halves of a chunk's bytes before those of the high halves."""
    w = tl.reshape(w, (w.shape[0], w.shape[1], 4, 4, 2))
    return tl.permute(w, (0, 1, 4, 2, 3))


@triton.jit
def _code(packed, scale, more, flip, BIT: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
          ENCODING: tl.constexpr):  # fmt: skip
    """Decode the codes whose highest bit is BIT of the words; rounded to SCALE first."""
    if (
        ENCODING == "mxfp4" or ENCODING == "gguf_mxfp4" or ENCODING == "nvfp4"
        or ENCODING == "ct_nvfp4"
    ):  # fmt: skip
        code = small_float(packed, BIT, E2M1) * E2M1_HALF * E2M1_HALF
    elif ENCODING == "fp8":
        code = small_float(packed, BIT, E4M3) * E4M3_HALF * E4M3_HALF
        code = tl.where((packed >> (BIT - 7)) & 0x7F == 0x7F, float("nan"), code)
    elif (
        ENCODING == "int4" or ENCODING == "q4_0" or ENCODING == "symmetric4"
        or ENCODING == "affine4"
    ):  # fmt: skip
        code = integer(packed, flip, BIT, FOUR) - more
    else:
        code = integer(packed, flip, BIT, EIGHT) - more
    return (code * scale).to(SCALE).to(KIND)


@triton.jit
def _k(packed, fifth, scale, least, flip, BIT: tl.constexpr, KIND: tl.constexpr,
       ENCODING: tl.constexpr):  # fmt: skip
    """Decode the codes of q4_k or q5_k whose highest bit but the fifth is BIT of the words."""
    code = k_code(packed, fifth, flip, BIT, ENCODING) - (32.0 if ENCODING == "q5_k" else 16.0)
    return (code * scale - least).to(KIND)


@triton.jit
def _k_tile(codes, k, flip, KIND: tl.constexpr, ENCODING: tl.constexpr):
    """Decode chunks of q4_k or q5_k: [N, inputs]."""
    packed, l5, h5, low, high, low_least, high_least = load_k_block(codes, k, ENCODING)
    s, m = low[:, :, None], low_least[:, :, None]
    a = _k(packed, l5, s, m, flip, 3, KIND, ENCODING)
    b = _k(packed, l5, s, m, flip, 11, KIND, ENCODING)
    c = _k(packed, l5, s, m, flip, 19, KIND, ENCODING)
    d = _k(packed, l5, s, m, flip, 27, KIND, ENCODING)
    s, m = high[:, :, None], high_least[:, :, None]
    e = _k(packed, h5, s, m, flip, 7, KIND, ENCODING)
    f = _k(packed, h5, s, m, flip, 15, KIND, ENCODING)
    g = _k(packed, h5, s, m, flip, 23, KIND, ENCODING)
    h = _k(packed, h5, s, m, flip, 31, KIND, ENCODING)
    w = _joined(a, b, c, d, e, f, g, h)  # [N, C, word, low or high, 2, 2]
    N: tl.constexpr = w.shape[0]
    C: tl.constexpr = w.shape[1]
    w = tl.reshape(w, (N, C // 2, 2, 4, 2, 4))
    return tl.reshape(tl.permute(w, (0, 1, 4, 2, 3, 5)), (N, C * 32))


@triton.jit
def _iq4(packed, s, more, flip, KIND: tl.constexpr, ENCODING: tl.constexpr):
    """Decode the eight codes of words of iq4_nl or iq4_xs, as `_joined` does."""
    first, second = look_up(packed)
    return _joined(
        _code(first, s, more, flip, 7, KIND, tl.float32, ENCODING),
        _code(first, s, more, flip, 15, KIND, tl.float32, ENCODING),
        _code(first, s, more, flip, 23, KIND, tl.float32, ENCODING),
        _code(first, s, more, flip, 31, KIND, tl.float32, ENCODING),
        _code(second, s, more, flip, 7, KIND, tl.float32, ENCODING),
        _code(second, s, more, flip, 15, KIND, tl.float32, ENCODING),
        _code(second, s, more, flip, 23, KIND, tl.float32, ENCODING),
        _code(second, s, more, flip, 31, KIND, tl.float32, ENCODING),
    )


@triton.jit
def _scales(
    scales, others, n, row, k, span_n,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load the scales of chunks k [C] of rows n [N]: [N, C, 1], or [N, C, 4] for their words."""
    if ENCODING == "nvfp4" or ENCODING == "ct_nvfp4":
        first, second = load_two_scales(scales, row, k)
        matrix = tl.load(others + n // span_n)[:, None]
        if ENCODING == "nvfp4":
            first, second = first * matrix, second * matrix
        else:
            first, second = tl.div_rn(first, matrix), tl.div_rn(second, matrix)
        early = (tl.arange(0, 4) < 2)[None, None, :]
        s = tl.where(early, first[:, :, None], second[:, :, None])
    else:
        s = load_scales(scales, row, k, ENCODING, GROUP, CHUNK)[:, :, None]
    return s


@triton.jit
def _six(packed, scale, flip, BIT: tl.constexpr, KIND: tl.constexpr):
    """Decode the codes of q6_k whose highest bit is BIT of the words."""
    return ((integer(packed, flip, BIT, SIX) - 96.0) * scale).to(KIND)


@triton.jit
def _q6_k_tile(codes, scales, others, row, span_n, k, flip, KIND: tl.constexpr):
    """Decode chunks of q6_k, a multiple of four: [N, inputs]."""
    low_codes, high_codes, low, high = load_q6_k(codes, scales, others, row, span_n, k)
    s, t = low[:, :, None], high[:, :, None]
    w = _joined(
        _six(low_codes, s, flip, 5, KIND),
        _six(low_codes, s, flip, 13, KIND),
        _six(low_codes, s, flip, 21, KIND),
        _six(low_codes, s, flip, 29, KIND),
        _six(high_codes, t, flip, 5, KIND),
        _six(high_codes, t, flip, 13, KIND),
        _six(high_codes, t, flip, 21, KIND),
        _six(high_codes, t, flip, 29, KIND),
    )
    N: tl.constexpr = w.shape[0]
    C: tl.constexpr = w.shape[1]
    w = tl.reshape(w, (N, C // 4, 4, 4, 2, 4))  # four chunks, their words, low or high
    return tl.reshape(tl.permute(w, (0, 1, 4, 2, 3, 5)), (N, C * 32))


@triton.jit
def decode_tile(
    codes, scales, others, n, k, row_n, scale_n, span_n, flip,
    KIND: tl.constexpr, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Decode chunks k [C] of rows n [N] to the model's type: [inputs, N].

    The other parameters are those of `project`.
    """
    rows = (codes + n * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    if ENCODING == "q4_k" or ENCODING == "q5_k":
        w = _k_tile(rows, k, flip, KIND, ENCODING)
    elif ENCODING == "q6_k":
        w = _q6_k_tile(rows, scales, others, (n * scale_n)[:, None], span_n, k, flip, KIND)
    else:
        packed = load_packed(rows, k)
        row = (n // (span_n if ENCODING == "fp8" else 1) * scale_n)[:, None]
        s = _scales(scales, others, n, row, k, span_n, ENCODING, GROUP, CHUNK)
        more = surplus(others, row, k, ENCODING, GROUP, CHUNK)
        AFFINE: tl.constexpr = (
            ENCODING == "symmetric4" or ENCODING == "affine4" or ENCODING == "symmetric8"
            or ENCODING == "affine8" or ENCODING == "signed8"
        )  # fmt: skip
        SCALE: tl.constexpr = scales.dtype.element_ty if AFFINE else tl.float32
        N: tl.constexpr = packed.shape[0]
        C: tl.constexpr = packed.shape[1]
        if CHUNK == 16:
            a = _code(packed, s, more, flip, 7, KIND, SCALE, ENCODING)
            b = _code(packed, s, more, flip, 15, KIND, SCALE, ENCODING)
            c = _code(packed, s, more, flip, 23, KIND, SCALE, ENCODING)
            d = _code(packed, s, more, flip, 31, KIND, SCALE, ENCODING)
            w = tl.join(tl.join(a, c), tl.join(b, d))
        elif ENCODING == "iq4_nl" or ENCODING == "iq4_xs":
            w = _iq4(packed, s, more, flip, KIND, ENCODING)
        else:
            w = _joined(
                _code(packed, s, more, flip, 3, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 7, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 11, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 15, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 19, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 23, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 27, KIND, SCALE, ENCODING),
                _code(packed, s, more, flip, 31, KIND, SCALE, ENCODING),
            )
        if (
            ENCODING == "q4_0" or ENCODING == "gguf_mxfp4" or ENCODING == "iq4_nl"
            or ENCODING == "iq4_xs"
        ):  # fmt: skip
            w = _halves(w)
        w = tl.reshape(w, (N, C * CHUNK))
    return tl.trans(w)
