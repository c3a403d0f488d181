"""Compiled kernels of dense layers: nn.Linear (`gemv`).

They run in a parallel region, like those of expert_group.py. `expand_rows` decodes an encoded
matrix, `copy_arguments` sets the arguments of other kernels, and `run_stages` calls other kernels.

A matrix argument is the address of unencoded weights. In a kernel that is compiled with `by_code`
it is instead the address of a record with three addresses: those of the code that multiplies the
encoded matrix (formats/encoded.py), of the matrix's layout and of its bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.products import dots
from greenroom.runtime.kernels.codegen.formats.encoded import (
    L_CODES,
    L_ROW,
    expanded_rows,
    multiply_row,
)
from greenroom.runtime.kernels.codegen.llvm.ir import (
    STACK,
    address_of,
    claim,
    dot_1x1,
    dot_1x4,
    enter_at,
    get,
    put,
    put_word,
    rounded,
    size_of,
    stack,
    word,
)
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS

UNIT = STACK  # weight rows of a unit of work
FEW = 8  # weight rows expanded at a time
F = np.float32(0)

# A matrix's record, int64: addresses of its product, of its layout and of its bytes.
RECORD_ARGUMENTS = 3
M_PRODUCT, M_LAYOUT, M_BASE = range(RECORD_ARGUMENTS)

# Arguments of `gemv`, after the cursor. Where the matrix is encoded each thread takes a ticket for
# STRIDE bytes at SCRATCH. X_WIDE, OUT_WIDE: plain matrices only, x and the sums in float32, or 0;
# OUT may be 0 with them.
(
    W, W_ROWS, W_COLUMNS, X, OUT, BIAS, X_ROWS, TICKET, SCRATCH, STRIDE, X_WIDE, OUT_WIDE,
) = range(1, 13)  # fmt: skip

# Arguments of `add_and_norm`, after the cursor (native/norms.hpp).
N_X, N_Y, N_SUM, N_OUT, N_WEIGHT, N_COLUMNS, N_EPS, N_STYLE, N_MORE = range(1, 10)
NORM_ARGUMENTS = 10

# Arguments of `expand_rows`, after the cursor. E_INDEX: address of int64 row numbers, or 0: E_ROWS
# rows from E_FIRST on.
E_MATRIX, E_ROWS, E_COLUMNS, E_FIRST, E_INDEX, E_OUT, E_TICKET, E_SCRATCH, E_STRIDE = range(1, 10)

# Arguments of an entry for several tokens, after the cursor: finished units, tokens, addresses of
# float32 inputs and outputs with a row per token (0: none), address of what follows: for each token
# the address of the arguments of the entry for one token.
R_DONE, R_COUNT, R_WIDE, R_OUT, R_CALLS, R_FIRST = range(1, 7)

# Arguments of `copy_arguments`, after the cursor: the number of runs; then for each run its target
# address, its source address and its length in int64.
RUN_COUNT, FIRST_RUN = 1, 2

# Arguments of `run_stages`: the number of stages, and the address of a barrier function (0: there
# is one thread). Then for each stage the addresses of its entry and of the entry's arguments. If
# the entry is 0, the second is the address of an int64, and all threads leave if that is 0.
STAGE_COUNT, BARRIER, FIRST_STAGE = range(3)

# How an RMSNorm applies its weight to the normalised value (`NORMS` in dense/accelerate.py).
ROUND_THEN_SCALE, SCALE_IN_FLOAT, ONE_PLUS_IN_FLOAT = range(3)


@njit(inline="always")
def store(kind, sums, bias, out, n):
    """Add a bias to n float32 sums, and store them, rounded to the model's type."""
    if bias != 0:
        for i in range(n):
            put(kind, out, i, get(F, sums, i) + get(kind, bias, i))
    else:
        for i in range(n):
            put(kind, out, i, get(F, sums, i))


@njit(inline="always")
def multiply_plain_rows(kind, w, first, n, K, x, out):
    """Multiply n consecutive rows of an unencoded weight matrix with one input row.

    The rows of the matrix w [N, K] begin with row `first`. w and x [K] have the model's type; the
    result out [n] is float32.
    """
    size = size_of(kind)
    w, tiled = w + first * K * size, n - n % COLUMNS
    for i in range(0, tiled, COLUMNS):
        dot_1x4(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (out + 4 * i,))
    for i in range(tiled, n):
        dot_1x1(kind, kind, w + i * K * size, K * size, K, K, 0, (x,), (out + 4 * i,))


@njit(inline="always")
def multiply_encoded_rows(matrix, first, n, K, x, out, scratch, packed, after):
    """Multiply n consecutive rows of an encoded weight matrix with one float32 row.

    `matrix` is the address of the matrix's record; its rows begin with row `first`. Return what
    `multiply_row` returns.
    """
    product, layout = word(matrix, M_PRODUCT), word(matrix, M_LAYOUT)
    base = word(matrix, M_BASE)
    return multiply_row(product, layout, base, K, first, n, K, 0, x, out, scratch, packed, after)


@njit(inline="always")
def row_codes(matrix, first):
    """Return the address of a row of an encoded weight matrix."""
    layout = word(matrix, M_LAYOUT)
    return word(matrix, M_BASE) + word(layout, L_CODES) + first * word(layout, L_ROW)


@njit(inline="always")
def widen_row(kind, x, n, out):
    """Convert a row of n numbers of a weight type to float32."""
    for i in range(n):
        put(F, out, i, get(kind, x, i))


@njit(inline="always")
def normalise(kind, xkind, x, n, weight, eps, style, okind, out):
    """Compute the RMSNorm of n numbers, rounded to the type of the norm's weight.

    `style` says how the weight is applied. The result is stored as type `okind`.
    """
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
    """Make a kernel that computes nn.Linear for few input rows.

    The kernel computes x [M, K] @ w [N, K].T, plus a bias [N] if there is one. Inputs, weights and
    result [M, N] have one type; sums are float32. If the caller also passes x as float32, weights
    are converted to float32 once for all rows.
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
                    x, after = wide + 4 * m * K, row_codes(word(p, W), word(p, 0) * UNIT)
                    packed = multiply_encoded_rows(
                        word(p, W), n0, n, K, x, sums, scratch, packed, after
                    )
                else:
                    multiply_plain_rows(kind, word(p, W), n0, n, K, word(p, X) + m * K * size, sums)
                store(kind, sums, bias, word(p, OUT) + (m * N + n0) * size, n)

    return enter


def expand_rows(kind):
    """Make a kernel that decodes rows of an encoded weight matrix to the model's type.

    The kernel writes [rows, columns], for consecutive rows or for a list of row numbers.
    """

    def enter(pointer):
        p = address_of(pointer)
        matrix, K, index = word(p, E_MATRIX), word(p, E_COLUMNS), word(p, E_INDEX)
        product, layout = word(matrix, M_PRODUCT), word(matrix, M_LAYOUT)
        scratch = word(p, E_SCRATCH) + claim(p, E_TICKET, 1) * word(p, E_STRIDE)
        step = 1 if index != 0 else FEW
        while True:
            n0 = claim(p, 0, 1) * step
            if n0 >= word(p, E_ROWS):
                return
            first = word(index, n0) if index != 0 else word(p, E_FIRST) + n0
            n = min(step, word(p, E_ROWS) - n0)
            rows = expanded_rows(product, layout, word(matrix, M_BASE), K, first, n, scratch)
            out = word(p, E_OUT) + n0 * K * size_of(kind)
            for i in range(n * K):
                put(kind, out, i, get(F, rows, i))

    return enter


def copy_arguments(kind):
    """Make a kernel that copies ranges of int64 kernel arguments in memory.

    `kind` is not used.
    """

    def enter(pointer):
        p = address_of(pointer)
        while True:
            number = claim(p, 0, 1)
            if number >= word(p, RUN_COUNT):
                return
            run = FIRST_RUN + 3 * number
            to, of = word(p, run), word(p, run + 1)
            for i in range(word(p, run + 2)):
                put_word(to, i, word(of, i))

    return enter


def run_stages(kind):
    """Make a kernel that calls other kernels one after another, with barriers between them.

    `kind` is not used.
    """

    def enter(pointer):
        p = address_of(pointer)
        barrier = word(p, BARRIER)
        for stage in range(word(p, STAGE_COUNT)):
            if stage != 0 and barrier != 0:
                enter_at(barrier, 0)
            entry, argument = word(p, FIRST_STAGE + 2 * stage), word(p, FIRST_STAGE + 2 * stage + 1)
            if entry != 0:
                enter_at(entry, argument)
            elif word(argument, 0) == 0:
                return

    return enter
