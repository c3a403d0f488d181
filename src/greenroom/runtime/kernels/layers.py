"""Compiled dense layers for a few tokens: `gemv` for nn.Linear, `rms_norm` for RMSNorm.

Bodies of a parallel region as in compiled.py, made of the same products.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.ir import (
    COLUMNS,
    STACK,
    address_of,
    claim,
    dot_1x1,
    dot_1x4,
    get,
    put,
    rounded,
    size_of,
    stack,
    word,
)

UNIT = STACK  # weight rows claimed together
F = np.float32(0)

# The words of `gemv`, of `rms_norm`; the first of both is the cursor.
W, W_ROWS, W_COLUMNS, X, OUT, BIAS, X_ROWS = range(1, 8)
N_X, N_OUT, N_WEIGHT, N_ROWS, N_COLUMNS, N_EPS, N_STYLE = range(1, 8)

# How an RMSNorm applies its weight to the normed value n (see norm.py).
ROUND_THEN_SCALE, SCALE_IN_FLOAT, ONE_PLUS_IN_FLOAT = range(3)


@njit(inline="always")
def store(kind, sums, bias, out, n):
    """Round n float32 sums to the model's type, with the bias added before."""
    if bias != 0:
        for i in range(n):
            put(kind, out, i, get(F, sums, i) + get(kind, bias, i))
    else:
        for i in range(n):
            put(kind, out, i, get(F, sums, i))


def gemv(kind, stamp):
    """out [M, N] = x [M, K] @ w [N, K].T (+ bias [N]), all of one type, summed in float32."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        sums = stack()
        size, N, K = size_of(kind), word(p, W_ROWS), word(p, W_COLUMNS)
        while True:
            n0 = claim(p, 0, 1) * UNIT
            if n0 >= N:
                return
            n, w = min(UNIT, N - n0), word(p, W) + n0 * K * size
            for m in range(word(p, X_ROWS)):
                x = word(p, X) + m * K * size
                whole = n - n % COLUMNS
                for i in range(0, whole, COLUMNS):
                    dot_1x4(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (sums + 4 * i,))
                for i in range(whole, n):
                    dot_1x1(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (sums + 4 * i,))
                bias = word(p, BIAS)
                if bias != 0:
                    bias += n0 * size
                store(kind, sums, bias, word(p, OUT) + (m * N + n0) * size, n)

    return enter


def rms_norm(kind, stamp):
    """x [M, N] over the root of its mean square, times a weight [N]; float32 inside."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        total = stack()
        size, n, style = size_of(kind), word(p, N_COLUMNS), word(p, N_STYLE)
        weight, eps = word(p, N_WEIGHT), get(F, p + 8 * N_EPS, 0)
        one = np.float32(1.0)
        for m in range(word(p, N_ROWS)):
            x, out = word(p, N_X) + m * n * size, word(p, N_OUT) + m * n * size
            dot_1x1(kind, kind, x, n * size, n, n, 0, (x,), (total,))
            scale = one / np.sqrt(get(F, total, 0) / np.float32(n) + eps)
            if style == ROUND_THEN_SCALE:
                for i in range(n):
                    v = rounded(kind, get(kind, x, i) * scale)
                    put(kind, out, i, get(kind, weight, i) * v)
            elif style == SCALE_IN_FLOAT:
                for i in range(n):
                    put(kind, out, i, get(kind, weight, i) * (get(kind, x, i) * scale))
            else:
                for i in range(n):
                    put(kind, out, i, (one + get(kind, weight, i)) * (get(kind, x, i) * scale))

    return enter
