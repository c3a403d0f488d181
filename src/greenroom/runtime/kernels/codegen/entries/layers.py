"""Parts of compiled kernels of dense layers.

A matrix argument is the address of unencoded weights. In a kernel that is compiled with `by_code`
it is instead the address of a record with three addresses: those of the code that multiplies the
encoded matrix (formats/encoded.py), of the matrix's layout and of its bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.formats.encoded import (
    L_CODES,
    L_ROW,
    multiply_row,
)
from greenroom.runtime.kernels.codegen.llvm.ir import (
    STACK,
    dot_1x1,
    dot_1x4,
    get,
    put,
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

# Number of arguments of `run_stages` (native/stages.cpp); stages may follow.
FIRST_STAGE = 3

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
