"""Triton programs that compute an expert's projections and the weighted sum over experts.

A tile is up to M entries (a token and one of its experts) of one expert; a program computes N
outputs of a tile. Weights are read in place. `tiles` has four numbers for each tile: where its slot
begins (in units of 64 bytes from slot 0), its expert, its first entry and its number of entries. A
tile without entries is skipped.
Sums run over the inputs in order, K at a time, in float32; values are rounded where transformers'
eager experts round them. Rows of a tile do not mix, so an entry's result depends neither on other
entries nor on expert groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels import activation
from greenroom.runtime.kernels.triton.chunks import exponent
from greenroom.runtime.kernels.triton.expand import expand
from greenroom.runtime.kernels.triton.tile import decode_tile

UNIT = 64  # bytes
OTHER_UNITS = tl.constexpr(UNIT // 4)  # float32 numbers in a unit

_RAW, _SILU = tl.constexpr(activation.RAW), tl.constexpr(activation.SILU)
_SILU_FLOAT, _RELU2 = tl.constexpr(activation.SILU_FLOAT), tl.constexpr(activation.RELU2)


@triton.jit
def dot(a, b, total, WIDE: tl.constexpr):
    """Compute total + a @ b; WIDE: in float32, where the type has no product."""
    if WIDE:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    return x.to(KIND).to(tl.float32)


@triton.jit
def _sum(total, bias, n, mask, KIND: tl.constexpr, BIAS: tl.constexpr):
    """Round a product as eager does, and again after adding its bias [N]."""
    h = _rounded(total, KIND)
    if BIAS:
        h = _rounded(h + tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)[None, :], KIND)
    return h


@triton.jit
def _activate(g, u, limit, alpha, KIND: tl.constexpr, ACTIVATION: tl.constexpr):
    """Apply a formula of kernels/activation.py, rounding after each of its operations."""
    if ACTIVATION == _SILU_FLOAT:
        h = g / (1.0 + tl.exp(-g)) * u
    elif ACTIVATION == _RELU2:
        h = tl.where(u < 0.0, 0.0, u)
        h = h * h
    else:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        if ACTIVATION == _SILU:
            h = _rounded(g / (1.0 + tl.exp(-g)), KIND) * u
        else:
            s = _rounded(1.0 / (1.0 + tl.exp(-_rounded(g * alpha, KIND))), KIND)
            h = _rounded(u + 1.0, KIND) * _rounded(g * s, KIND)
    return h


@triton.jit
def finish(
    g, u, bias, out, row, n, gate_n, up_n, rows_mask, expert, outputs, limit, alpha,
    KIND: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """Round, activate and store sums of gate and up projection [M, N], in Triton."""
    width = outputs * 2 if GATED else outputs
    mask = rows_mask & (n < outputs)[None, :]
    bias += expert * width
    if SEGMENT == 0:
        u = _sum(u, bias, up_n, n < outputs, KIND, BIAS)
    if GATED:
        g = _sum(g, bias, gate_n, n < outputs, KIND, BIAS)
    if SEGMENT > 0:
        tl.store(out + row[:, None] * outputs + n[None, :], u, mask=mask)
    elif ACTIVATION == _RAW:
        if GATED:
            tl.store(out + row[:, None] * width + gate_n[None, :], g.to(KIND), mask=mask)
        tl.store(out + row[:, None] * width + up_n[None, :], u.to(KIND), mask=mask)
    else:
        h = _activate(g, u, limit, alpha, KIND, ACTIVATION)
        tl.store(out + row[:, None] * outputs + n[None, :], h.to(KIND), mask=mask)


@triton.jit
def _weights(
    codes, scales, others, n, width, k, k0, inputs, row_n, row_k, scale_n, span_n, span_k, flip,
    KIND: tl.constexpr, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """Decode the inputs k [K], which begin at k0, of the rows n [N] of a matrix of `width` rows."""
    if GROUP > 0:  # beyond the last chunk, where inputs are 0, is the last one again
        C: tl.constexpr = k.shape[0] // CHUNK
        chunk = tl.minimum(k0 // CHUNK + tl.arange(0, C), inputs // CHUNK - 1)
        w = decode_tile(codes, scales, others, tl.minimum(n, width - 1), chunk, row_n, scale_n,
                        span_n, flip, KIND, ENCODING, GROUP, CHUNK, RUNS)  # fmt: skip
    else:
        inside = (k < inputs)[:, None] & (n < width)[None, :]
        w = expand(codes, scales, others, n[None, :], k[:, None], inside, row_n, row_k, scale_n,
                   span_n, span_k, KIND, ENCODING)  # fmt: skip
    return w


@triton.jit
def project(
    x, tiles, tokens, codes, scales, others, bias, out, inputs, outputs, code_at, scale_at,
    other_at, row_n, row_k, scale_n, span_n, span_k, limit, alpha,
    ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr,
    GATHERED: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SEGMENT: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, CODE_UNITS: tl.constexpr,
    SCALE_UNITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile's rows with its expert's matrix, and apply the activation, in Triton.

    x is [T, inputs], indexed by `tokens`, if GATHERED, else [entries, inputs]. The result `out` is
    [entries, outputs]. With ACTIVATION = RAW there is no activation, and if GATED the result is
    [entries, 2 * outputs] in the module's layout. The down projection of a SEGMENT of channels
    leaves a sum in float32, without bias: 1 begins it, 2 continues the one in `out`.

    GROUP: inputs that share a scale; 0: codes are read one by one, and not CHUNK at a time
    RUNS:  of GGUF types, as in chunks.py
    """
    KIND: tl.constexpr = x.dtype.element_ty
    tile, block = tl.program_id(1), tl.program_id(0)
    slot, expert = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    first, count = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    codes += slot * CODE_UNITS + code_at
    scales += slot * SCALE_UNITS + scale_at
    others += slot * OTHER_UNITS + other_at
    m, n = tl.arange(0, M), block * N + tl.arange(0, N)
    rows_mask, row = (m < count)[:, None], first + m
    source = tl.load(tokens + row, mask=m < count, other=0) if GATHERED else row
    gate_n = n * 2 if INTERLEAVED else n
    up_n = (n * 2 + 1 if INTERLEAVED else n + outputs) if GATED else n
    g, u = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    # Gate and up in turns are one tile, so that neighbours are loaded together.
    PAIRED: tl.constexpr = GATED and INTERLEAVED and ENCODING == "plain"
    if PAIRED:
        both_n, both = block * N * 2 + tl.arange(0, 2 * N), tl.zeros((M, 2 * N), tl.float32)
    mask = rows_mask & (n < outputs)[None, :]
    if SEGMENT == 2:
        u = tl.load(out + row[:, None] * outputs + n[None, :], mask=mask, other=0.0)
    flip, width = exponent(ENCODING, RUNS), outputs * 2 if GATED else outputs
    for k0 in range(0, tl.where(count > 0, inputs, 0), K):
        k = k0 + tl.arange(0, K)
        place = x + source[:, None] * inputs + k[None, :]
        a = tl.load(place, mask=rows_mask & (k < inputs)[None, :], other=0.0)
        if PAIRED:
            w = _weights(codes, scales, others, both_n, width, k, k0, inputs, row_n, row_k, scale_n,
                         span_n, span_k, flip, KIND, ENCODING, GROUP, CHUNK, RUNS)  # fmt: skip
            both = dot(a, w, both, WIDE)
        else:
            if GATED:
                w = _weights(codes, scales, others, gate_n, width, k, k0, inputs, row_n, row_k,
                             scale_n, span_n, span_k, flip, KIND, ENCODING, GROUP, CHUNK,
                             RUNS)  # fmt: skip
                g = dot(a, w, g, WIDE)
            w = _weights(codes, scales, others, up_n, width, k, k0, inputs, row_n, row_k, scale_n,
                         span_n, span_k, flip, KIND, ENCODING, GROUP, CHUNK, RUNS)  # fmt: skip
            u = dot(a, w, u, WIDE)
    if PAIRED:
        g, u = tl.split(tl.reshape(both, (M, N, 2)))
    finish(g, u, bias, out, row, n, gate_n, up_n, rows_mask, expert, outputs, limit, alpha,
           KIND, GATED, ACTIVATION, BIAS, SEGMENT)  # fmt: skip


@triton.jit
def combine(
    out, weights, order, result, top_k, hidden,
    ROUND_PRODUCT: tl.constexpr, ROUND_SUM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum each token's weighted expert outputs in a given order, in Triton.

    The result is [T, H]. `order` [T, top_k, 2] has for each summand its row in `out` and the index
    of its gate weight; a row of -1 is left out.
    """
    KIND: tl.constexpr = result.dtype.element_ty
    token, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for j in range(top_k):
        at = order + (token * top_k + j) * 2
        entry = tl.load(at) + tl.zeros((N,), tl.int64)
        weight = tl.load(weights + tl.maximum(tl.load(at + 1), 0)).to(tl.float32)
        mask = (entry >= 0) & (n < hidden)
        product = tl.load(out + entry * hidden + n, mask=mask, other=0.0).to(tl.float32) * weight
        if ROUND_PRODUCT:
            product = _rounded(product, KIND)
        total = tl.where(mask, total + product, total)
        if ROUND_SUM:
            total = _rounded(total, KIND)
    tl.store(result + token * hidden + n, total.to(KIND), mask=n < hidden)
