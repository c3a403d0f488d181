"""Parts of compiled kernels of dense layers.

A matrix argument is the address of unencoded weights. In a kernel that is compiled with `by_code`
it is instead the address of a record with three addresses: those of the code that multiplies the
encoded matrix (formats/encoded.py), of the matrix's layout and of its bytes.
"""

from __future__ import annotations

FEW = 8  # weight rows expanded at a time

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

# Number of arguments of `run_stages` (native/stages.cpp); stages may follow.
FIRST_STAGE = 3

# How an RMSNorm applies its weight to the normalised value (`NORMS` in dense/accelerate.py).
ROUND_THEN_SCALE, SCALE_IN_FLOAT, ONE_PLUS_IN_FLOAT = range(3)
