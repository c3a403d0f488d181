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
    integer,
    load_packed,
    load_scales,
    load_two_scales,
    run_code,
    small_float,
    surplus,
)
from greenroom.runtime.kernels.triton.iq4 import look_up
from greenroom.runtime.kernels.triton.runs import load_runs


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
def _matrix(w, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr):
    """Reshape decoded values to [N, K].

    Triton 3.6 moves a reshape that is directly before a product behind the copy to shared memory,
    where it finds no layout for tiles of four dimensions and ends. So a bitcast is between them.
    """
    return tl.reshape(w.to(tl.int16, bitcast=True), (N, K)).to(KIND, bitcast=True)


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
def _run_codes(run, flip, BIT: tl.constexpr, KIND: tl.constexpr, RUNS: tl.constexpr):
    """Decode the codes of a run that begin at BIT of its words: [N, C, 4]."""
    packed, scale, least = run
    HAS_MINIMA: tl.constexpr = RUNS[2] == 1 << RUNS[0]
    w = (run_code(packed, flip, BIT, RUNS) - RUNS[2]) * scale[:, :, None]
    if HAS_MINIMA:
        w -= least[:, :, None]
    return w.to(KIND)


@triton.jit
def _runs_tile(codes, scales, others, row, span_n, k, flip, KIND: tl.constexpr,
               ENCODING: tl.constexpr, RUNS: tl.constexpr):  # fmt: skip
    """Decode chunks of two runs: [N, inputs]."""
    first, second = load_runs(codes, scales, others, row, span_n, k, ENCODING)
    w = _joined(
        _run_codes(first, flip, 0, KIND, RUNS),
        _run_codes(first, flip, 8, KIND, RUNS),
        _run_codes(first, flip, 16, KIND, RUNS),
        _run_codes(first, flip, 24, KIND, RUNS),
        _run_codes(second, flip, RUNS[3], KIND, RUNS),
        _run_codes(second, flip, RUNS[3] + 8, KIND, RUNS),
        _run_codes(second, flip, RUNS[3] + 16, KIND, RUNS),
        _run_codes(second, flip, RUNS[3] + 24, KIND, RUNS),
    )  # [N, C, word, run, 2, 2]
    N: tl.constexpr = w.shape[0]
    C: tl.constexpr = w.shape[1]
    w = tl.reshape(w, (N, C // RUNS[1], RUNS[1], 4, 2, 4))
    return _matrix(tl.permute(w, (0, 1, 4, 2, 3, 5)), N, C * 32, KIND)


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
def decode_tile(
    codes, scales, others, n, k, row_n, scale_n, span_n, flip,
    KIND: tl.constexpr, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """Decode chunks k [C] of rows n [N] to the model's type: [inputs, N].

    The other parameters are those of `project`.
    """
    rows = (codes + n * row_n).to(tl.pointer_type(tl.int32))[:, None, None]
    if RUNS[0] > 0:
        blocks = (n * scale_n)[:, None]
        w = _runs_tile(rows, scales, others, blocks, span_n, k, flip, KIND, ENCODING, RUNS)
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
        w = _matrix(w, N, C * CHUNK, KIND)
    return tl.trans(w)
