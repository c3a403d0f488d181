"""Compiled dense layers for a few tokens: `gemv` for nn.Linear, `rms_norm` for RMSNorm.

Bodies of a parallel region as in compiled.py, made of the same products. `in_turn` is a body made
of others, `join` what lies between the halves of a decoder layer.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.compiled import dots
from greenroom.runtime.kernels.emit import COLUMNS
from greenroom.runtime.kernels.ir import (
    STACK,
    address_of,
    claim,
    dot_1x1,
    dot_1x4,
    enter_at,
    float_of,
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
W, W_ROWS, W_COLUMNS, X, OUT, BIAS, X_ROWS, X_WIDE, OUT_WIDE = range(1, 10)
N_X, N_OUT, N_WEIGHT, N_ROWS, N_COLUMNS, N_EPS, N_STYLE = range(1, 8)

# The words of `join`.
J_X, J_Y, J_SUM, J_OUT, J_WEIGHT, J_COLUMNS, J_EPS, J_STYLE = range(1, 9)
JOIN_WORDS = 9

# The words of a body for several tokens: how many units are done, how many tokens, float32 matrices
# of their inputs and outputs, a row a token (0: none), and for each the address of the words that
# the body for one token would have.
R_DONE, R_COUNT, R_WIDE, R_OUT, R_FIRST = range(1, 6)

# The words of `in_turn`: bodies, and the address of what makes threads wait for each other (0:
# there is one thread). The address of each body follows, and that of its words.
COUNT, WAIT, FIRST = range(3)

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


@njit(inline="always")
def multiply(kind, weight, bias, x, out, N, K, n0, sums):
    """UNIT rows of w [N, K] from row n0 on times one row x [K]; `sums` is room for UNIT floats."""
    size = size_of(kind)
    n, w = min(UNIT, N - n0), weight + n0 * K * size
    whole = n - n % COLUMNS
    for i in range(0, whole, COLUMNS):
        dot_1x4(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (sums + 4 * i,))
    for i in range(whole, n):
        dot_1x1(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (sums + 4 * i,))
    if bias != 0:
        bias += n0 * size
    store(kind, sums, bias, out + n0 * size, n)


@njit(inline="always")
def normalise(kind, xkind, x, n, weight, eps, style, okind, out):
    """A row over the root of its mean square, times a weight of `kind`; rounded to `kind`."""
    total, one = stack(), np.float32(1.0)
    dot_1x1(xkind, xkind, x, 4 * n, n, n, 0, (x,), (total,))
    scale = one / np.sqrt(get(F, total, 0) / np.float32(n) + eps)
    if style == ROUND_THEN_SCALE:
        for i in range(n):
            v = rounded(kind, get(xkind, x, i) * scale)
            put(okind, out, i, rounded(kind, get(kind, weight, i) * v))
    elif style == SCALE_IN_FLOAT:
        for i in range(n):
            v = get(kind, weight, i) * (get(xkind, x, i) * scale)
            put(okind, out, i, rounded(kind, v))
    else:
        for i in range(n):
            v = (one + get(kind, weight, i)) * (get(xkind, x, i) * scale)
            put(okind, out, i, rounded(kind, v))


def gemv(kind, stamp):
    """out [M, N] = x [M, K] @ w [N, K].T (+ bias [N]), all of one type, summed in float32.

    Several rows are given in float32 too, with room for their sums: weights are widened once then.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        sums = stack()
        size, N, K = size_of(kind), word(p, W_ROWS), word(p, W_COLUMNS)
        while True:
            n0 = claim(p, 0, 1) * UNIT
            if n0 >= N:
                return
            if word(p, X_WIDE) != 0:
                n, rows, sums_of = min(UNIT, N - n0), word(p, X_ROWS), word(p, OUT_WIDE)
                w, bias = word(p, W) + n0 * K * size, word(p, BIAS)
                dots(
                    kind, w, K * size, K, n, K, 0, word(p, X_WIDE), K, 0, sums_of, N, 0, n0, 0, rows
                )  # fmt: skip
                if bias != 0:
                    bias += n0 * size
                for m in range(rows):
                    out = word(p, OUT) + (m * N + n0) * size
                    store(kind, sums_of + 4 * (m * N + n0), bias, out, n)
                continue
            for m in range(word(p, X_ROWS)):
                x, out = word(p, X) + m * K * size, word(p, OUT) + m * N * size
                multiply(kind, word(p, W), word(p, BIAS), x, out, N, K, n0, sums)

    return enter


def rms_norm(kind, stamp):
    """x [M, N] over the root of its mean square, times a weight [N]; float32 inside."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        size, n, style = size_of(kind), word(p, N_COLUMNS), word(p, N_STYLE)
        weight, eps = word(p, N_WEIGHT), get(F, p + 8 * N_EPS, 0)
        for m in range(word(p, N_ROWS)):
            x, out = word(p, N_X) + m * n * size, word(p, N_OUT) + m * n * size
            normalise(kind, kind, x, n, weight, eps, style, kind, out)

    return enter


@njit(inline="always")
def join_row(kind, p):
    """What `join` does, with the words at p."""
    n, x, y, out = word(p, J_COLUMNS), word(p, J_X), word(p, J_Y), word(p, J_OUT)
    if y != 0:
        for i in range(n):
            put(kind, word(p, J_SUM), i, get(kind, x, i) + get(kind, y, i))
        x = word(p, J_SUM)
    if out != 0:
        eps = float_of(np.int32(word(p, J_EPS)))
        normalise(kind, kind, x, n, word(p, J_WEIGHT), eps, word(p, J_STYLE), kind, out)


def join(kind, stamp):
    """sum = x + y (y 0: x as it is), out = its RMSNorm (out 0: not wanted); rows of `kind` [N].

    One thread does it. `sum` may be 0 where y is.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        if claim(p, 0, 1) == 0:
            join_row(kind, p)

    return enter


def join_rows(kind, stamp):
    """`join` for several tokens, each told by words of its own; a thread does a token. Its norm is
    also left in float32, where there is a matrix for it."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        while True:
            token = claim(p, 0, 1)
            if token >= word(p, R_COUNT):
                return
            own, wide = word(p, R_FIRST + token), word(p, R_WIDE)
            join_row(kind, own)
            if wide != 0:
                n = word(own, J_COLUMNS)
                for i in range(n):
                    put(F, wide + 4 * token * n, i, get(kind, word(own, J_OUT), i))

    return enter


def in_turn(kind, stamp):
    """Enter other bodies one after the other; all threads have left one before any enters the next.

    `kind` is of no consequence.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        wait = word(p, WAIT)
        for stage in range(word(p, COUNT)):
            if stage != 0 and wait != 0:
                enter_at(wait, 0)
            enter_at(word(p, FIRST + 2 * stage), word(p, FIRST + 2 * stage + 1))

    return enter
