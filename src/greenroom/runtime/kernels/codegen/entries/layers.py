"""Compiled dense layers for a few tokens: `gemv` for nn.Linear, `join` for RMSNorm.

Bodies of a parallel region as in compiled.py, made of the same products. `in_turn` is a body made
of others, `renew` sets their words; `join` is also what lies between the halves of a decoder
layer, `unfold` expands a stored matrix.

A matrix is the address of its plain weights, or, where a body is compiled `by_code`, of a record:
matrices are then read as they are stored (encoded.py), and have the bits of expanded ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.products import dots
from greenroom.runtime.kernels.codegen.formats.encoded import L_CODES, L_ROW, expanded_rows, one_row
from greenroom.runtime.kernels.codegen.llvm.ir import (
    STACK,
    address_of,
    claim,
    dot_1x1,
    dot_1x4,
    enter_at,
    float_of,
    get,
    put,
    put_word,
    rounded,
    size_of,
    stack,
    word,
)
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS

UNIT = STACK  # weight rows claimed together
FEW = 8  # weight rows that are expanded together
F = np.float32(0)

# A matrix's record: its product, the words of its layout, where its bytes begin.
RECORD_WORDS = 3
M_PRODUCT, M_LAYOUT, M_BASE = range(RECORD_WORDS)

# The words of `gemv`; the first is the cursor. Where matrices are encoded each thread takes a
# ticket for `STRIDE` bytes at SCRATCH; X_WIDE and OUT_WIDE are of plain ones. OUT may be 0 then.
(
    W, W_ROWS, W_COLUMNS, X, OUT, BIAS, X_ROWS, TICKET, SCRATCH, STRIDE, X_WIDE, OUT_WIDE,
) = range(1, 13)  # fmt: skip

# The words of `join`. J_MORE: rows after the first.
J_X, J_Y, J_SUM, J_OUT, J_WEIGHT, J_COLUMNS, J_EPS, J_STYLE, J_MORE = range(1, 10)
JOIN_WORDS = 10

# The words of `unfold`; U_INDEX: int64 numbers of rows, or 0: the rows from U_FIRST on.
U_MATRIX, U_ROWS, U_COLUMNS, U_FIRST, U_INDEX, U_OUT, U_TICKET, U_SCRATCH, U_STRIDE = range(1, 10)

# The words of a body for several tokens: how many units are done, how many tokens, float32 matrices
# of their inputs and outputs, a row a token (0: none), and for each the address of the words that
# the body for one token would have.
R_DONE, R_COUNT, R_WIDE, R_OUT, R_FIRST = range(1, 6)

# The words of `renew`: how many runs of words there are; then for each where it goes, where it
# comes from, and how many words it has.
RUNS, RUN = 1, 2

# The words of `in_turn`: bodies, and the address of what makes threads wait for each other (0:
# there is one thread). The address of each body follows, and that of its words; where there is no
# body (0), that of a word without which all leave.
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
def plain_rows(kind, w, first, n, K, x, out):
    """out[:n] = rows first.. of w [N, K] times one row x [K], all of `kind`; out is float32."""
    size = size_of(kind)
    w, whole = w + first * K * size, n - n % COLUMNS
    for i in range(0, whole, COLUMNS):
        dot_1x4(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (out + 4 * i,))
    for i in range(whole, n):
        dot_1x1(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (out + 4 * i,))


@njit(inline="always")
def coded_rows(matrix, first, n, K, x, out, scratch, packed, after):
    """As `plain_rows` for a recorded matrix and a row x of float32; see `one_row`."""
    product, layout = word(matrix, M_PRODUCT), word(matrix, M_LAYOUT)
    base = word(matrix, M_BASE)
    return one_row(product, layout, base, K, first, n, K, 0, x, out, scratch, packed, after)


@njit(inline="always")
def codes_at(matrix, first):
    """Where the codes of a row of a recorded matrix lie."""
    layout = word(matrix, M_LAYOUT)
    return word(matrix, M_BASE) + word(layout, L_CODES) + first * word(layout, L_ROW)


@njit(inline="always")
def widen_row(kind, x, n, out):
    """n numbers of `kind` as float32."""
    for i in range(n):
        put(F, out, i, get(kind, x, i))


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


def gemv(kind, by_code):
    """out [M, N] = x [M, K] @ w [N, K].T (+ bias [N]), all of one type, summed in float32.

    Several rows are given in float32 too, with room for their sums: weights are widened once then.
    """

    def enter(pointer):
        p = address_of(pointer)
        sums, packed = stack(), 0
        size, N, K, rows = size_of(kind), word(p, W_ROWS), word(p, W_COLUMNS), word(p, X_ROWS)
        if by_code:
            wide = word(p, SCRATCH) + claim(p, TICKET, 1) * word(p, STRIDE)
            widen_row(kind, word(p, X), rows * K, wide)
            scratch = wide + 4 * rows * K
        while True:
            n0 = claim(p, 0, 1) * UNIT
            if n0 >= N:
                return
            n, bias = min(UNIT, N - n0), word(p, BIAS)
            if bias != 0:
                bias += n0 * size
            if not by_code and word(p, X_WIDE) != 0:
                w, of = word(p, W) + n0 * K * size, word(p, OUT_WIDE)
                dots(
                    kind, w, K * size, K, n, K, 0, word(p, X_WIDE), K, 0, of, N, 0, n0, 0, rows
                )  # fmt: skip
                for m in range(rows if word(p, OUT) != 0 else 0):
                    out = word(p, OUT) + (m * N + n0) * size
                    store(kind, of + 4 * (m * N + n0), bias, out, n)
                continue
            for m in range(rows):
                if by_code:
                    x, after = wide + 4 * m * K, codes_at(word(p, W), word(p, 0) * UNIT)
                    packed = coded_rows(word(p, W), n0, n, K, x, sums, scratch, packed, after)
                else:
                    plain_rows(kind, word(p, W), n0, n, K, word(p, X) + m * K * size, sums)
                store(kind, sums, bias, word(p, OUT) + (m * N + n0) * size, n)

    return enter


def unfold(kind):
    """Rows of a recorded matrix, expanded to out [rows, columns] of `kind`."""

    def enter(pointer):
        p = address_of(pointer)
        matrix, K, index = word(p, U_MATRIX), word(p, U_COLUMNS), word(p, U_INDEX)
        product, layout = word(matrix, M_PRODUCT), word(matrix, M_LAYOUT)
        scratch = word(p, U_SCRATCH) + claim(p, U_TICKET, 1) * word(p, U_STRIDE)
        step = 1 if index != 0 else FEW
        while True:
            n0 = claim(p, 0, 1) * step
            if n0 >= word(p, U_ROWS):
                return
            first = word(index, n0) if index != 0 else word(p, U_FIRST) + n0
            n = min(step, word(p, U_ROWS) - n0)
            rows = expanded_rows(product, layout, word(matrix, M_BASE), K, first, n, scratch)
            out = word(p, U_OUT) + n0 * K * size_of(kind)
            for i in range(n * K):
                put(kind, out, i, get(F, rows, i))

    return enter


@njit(inline="always")
def join_row(kind, p):
    """What `join` does, with the words at p."""
    n, y, out, total = word(p, J_COLUMNS), word(p, J_Y), word(p, J_OUT), word(p, J_SUM)
    for m in range(word(p, J_MORE) + 1):
        offset = m * n * size_of(kind)
        x = word(p, J_X) + offset
        if y != 0:
            for i in range(n):
                put(kind, total + offset, i, get(kind, x, i) + get(kind, y + offset, i))
            x = total + offset
        if out != 0:
            eps = float_of(np.int32(word(p, J_EPS)))
            normalise(
                kind, kind, x, n, word(p, J_WEIGHT), eps, word(p, J_STYLE), kind, out + offset
            )


def join(kind):
    """sum = x + y (y 0: x as it is), out = its RMSNorm (out 0: not wanted); rows of `kind` [N].

    One thread does it. `sum` may be 0 where y is. The norm: a row over the root of its mean square,
    times a weight [N]; float32 inside.
    """

    def enter(pointer):
        p = address_of(pointer)
        if claim(p, 0, 1) == 0:
            join_row(kind, p)

    return enter


def join_rows(kind):
    """`join` for several tokens, each told by words of its own; a thread does a token. Its norm is
    also left in float32, where there is a matrix for it."""

    def enter(pointer):
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


def renew(kind):
    """Copy runs of words. `kind` is of no consequence."""

    def enter(pointer):
        p = address_of(pointer)
        while True:
            number = claim(p, 0, 1)
            if number >= word(p, RUNS):
                return
            run = RUN + 3 * number
            to, of = word(p, run), word(p, run + 1)
            for i in range(word(p, run + 2)):
                put_word(to, i, word(of, i))

    return enter


def in_turn(kind):
    """Enter other bodies one after the other; all threads have left one before any enters the next.

    `kind` is of no consequence.
    """

    def enter(pointer):
        p = address_of(pointer)
        wait = word(p, WAIT)
        for stage in range(word(p, COUNT)):
            if stage != 0 and wait != 0:
                enter_at(wait, 0)
            entry, argument = word(p, FIRST + 2 * stage), word(p, FIRST + 2 * stage + 1)
            if entry != 0:
                enter_at(entry, argument)
            elif word(argument, 0) == 0:
                return

    return enter
