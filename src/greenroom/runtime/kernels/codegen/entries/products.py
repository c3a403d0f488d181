"""Products of input rows with one expert's matrix: plain, transposed, or encoded."""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.formats.encoded import expanded_rows, multiply_row
from greenroom.runtime.kernels.codegen.llvm.ir import (
    axpy_1x1,
    axpy_many,
    dot_1x1,
    dot_1x4,
    dot_many,
    get,
    panel_1,
    panel_8,
    put,
    row,
    rows,
    size_of,
)
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS, LANES, ROWS, STRIP

BLOCK = 64  # elements of the intermediate dimension of one partial sum
FEW = 4  # up to so many rows, one by one is faster than expanding encoded weights once
MANY = 8  # from so many rows on an expert's weights are widened once
GROUP = 16  # weight rows widened at a time
F = np.float32(0)


@njit(error_model="numpy")
def dots(kind, w, ld, K, N, block, carry, x, xs, xi, out, outs, oi, column, j0, j1):
    """Multiply rows of x with the transpose of a weight matrix, in tiles.

    Computes out[j, column:column + N] = x[j] @ w.T for rows j0 to j1 - 1 of x, or adds the product
    to out if `carry` is not 0. The weight matrix w has N rows of K elements, which begin `ld` bytes
    apart.
    """
    out += 4 * column
    for j in range(j0, j1, ROWS):
        many = j1 - j >= ROWS
        tiled = N - N % COLUMNS
        if many:
            many_x = rows(x, xi, j, xs)
            for n in range(0, tiled, COLUMNS):
                ends = rows(out + 4 * n, oi, j, outs)
                dot_many(kind, F, w + n * ld, ld, K, block, carry, many_x, ends)
        for i in range(j, min(j + ROWS, j1)):
            xa, oa = row(x, xi, i, xs), row(out, oi, i, outs)
            if not many:
                for n in range(0, tiled, COLUMNS):
                    dot_1x4(kind, F, w + n * ld, ld, K, block, carry, (xa,), (oa + 4 * n,))
            for n in range(tiled, N):
                dot_1x1(kind, F, w + n * ld, ld, K, block, carry, (xa,), (oa + 4 * n,))


@njit(error_model="numpy")
def panels(kind, w, ld, K, N, block, carry, x, out, cells):
    """Multiply one row with a transposed weight matrix, reading along the matrix's rows.

    Computes out[:N] = x[:K] @ w, or adds the product to out if `carry` is not 0. N is a multiple of
    the vector length.
    """
    # The tiles of `axpys` would touch a new page of memory for every few cache lines.
    if carry == 0:
        for n in range(N):
            put(F, out, n, F)
    for start in range(0, K, block):
        stop = min(start + block, K)
        for n in range(N):
            put(F, cells, n, F)
        eights = stop - (stop - start) % 8
        for k in range(start, eights, 8):
            panel_8(kind, w + k * ld, ld, N, x + 4 * k, cells)
        for k in range(eights, stop):
            panel_1(kind, w + k * ld, ld, N, x + 4 * k, cells)
        for n in range(N):
            put(F, out, n, get(F, out, n) + get(F, cells, n))


@njit(error_model="numpy")
def axpys(
    kind, w, ld, K, N, block, carry, x, xs, xi, out, outs, oi, column, j0, j1, scratch
):  # fmt: skip
    """Multiply rows of x with a transposed weight matrix, in tiles.

    Computes out[j, column:column + N] = x[j] @ w for rows j0 to j1 - 1 of x, or adds the product to
    out if `carry` is not 0. The weight matrix w has K rows, which begin `ld` bytes apart; N of its
    columns are used.
    """
    size = size_of(kind)
    out += 4 * column
    for j in range(j0, j1, ROWS):
        many = j1 - j >= ROWS
        step = STRIP * LANES if many else LANES
        tiled = N - N % step
        if many:
            many_x = rows(x, xi, j, xs)
            for n in range(0, tiled, step):
                ends = rows(out + 4 * n, oi, j, outs)
                axpy_many(kind, w + n * size, ld, K, block, carry, 0, many_x, ends)
        for i in range(j, min(j + ROWS, j1)):
            xa, oa = row(x, xi, i, xs), row(out, oi, i, outs)
            if not many:
                panels(kind, w, ld, K, tiled, block, carry, xa, oa, scratch)
            for n in range(tiled, N, LANES):
                axpy_1x1(kind, w + n * size, ld, K, block, carry, N - n, (xa,), (oa + 4 * n,))


@njit(inline="always")
def multiply_plain(kind, w, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch):
    """Multiply input rows with some rows of one expert's unencoded matrix.

    The rows first to first + N - 1 of the weight matrix w [width, K] are multiplied with rows j0 to
    j1 - 1 of x; the results are columns first to first + N - 1 of out. x and out are float32, with
    rows of K and `width` elements. `xi` and `oi` are addresses of row numbers of x and out, or 0 if
    the rows are consecutive.
    """
    size = size_of(kind)
    ld = K * size
    w += first * ld
    if j1 - j0 < MANY or size == 4:
        dots(kind, w, ld, K, N, block, carry, x, K, xi, out, width, oi, first, j0, j1)
        return
    for n in range(0, N, GROUP):
        count = min(GROUP, N - n)
        for i in range(count * K):
            put(F, scratch, i, get(kind, w + n * ld, i))
        dots(
            F, scratch, K * 4, K, count, block, carry, x, K, xi, out, width, oi, first + n, j0, j1
        )  # fmt: skip


@njit(inline="always")
def multiply_transposed(kind, w, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch):
    """Multiply input rows with some columns of one expert's transposed matrix [K, width].

    The parameters are those of `multiply_plain`. For many rows, strips of the matrix are converted
    to float32 block by block, once for all rows.
    """
    size = size_of(kind)
    w, ld = w + first * size, width * size
    if j1 - j0 < MANY or size == 4:
        axpys(
            kind, w, ld, K, N, block, carry, x, K, xi, out, width, oi, first, j0, j1, scratch
        )  # fmt: skip
        return
    tile = STRIP * LANES
    cells = scratch + 4 * tile * BLOCK
    for n in range(0, N, tile):
        count = min(tile, N - n)
        for start in range(0, K, block):
            depth = min(block, K - start)
            for k in range(depth):
                source, target = w + n * size + (start + k) * ld, scratch + 4 * tile * k
                for i in range(count):
                    put(F, target, i, get(kind, source, i))
            axpys(
                F, scratch, 4 * tile, depth, count, depth, carry + start, x + 4 * start, K, xi,
                out, width, oi, first + n, j0, j1, cells,
            )  # fmt: skip


@njit(inline="always")
def multiply_encoded(
    product, layout, slot, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch,
    packed, after, sequential_rows,
):  # fmt: skip
    """Multiply input rows with one expert's encoded matrix.

    `product` is the address of the code that multiplies this encoding; the parameters without a
    description are those of `multiply_plain`.

    Up to `sequential_rows` input rows are multiplied one by one, with weights in registers. The
    result for a row is then bit for bit that of a batch of one. For more rows, 16 rows of weights
    at a time are decoded to the scratch memory.

    `packed` is the address of the input row whose integers are in the scratch memory (0: none). The
    new value is returned, for the next call. The codes at the address `after` are prefetched to the
    CPU cache, since they are read next.
    """
    if j1 - j0 <= sequential_rows:
        for j in range(j0, j1):
            one, result = row(x, xi, j, K), row(out, oi, j, width) + 4 * first
            packed = multiply_row(
                product, layout, slot, K, first, N, block, carry, one, result, scratch, packed,
                after,
            )  # fmt: skip
        return packed
    for n in range(0, N, GROUP):
        count = min(GROUP, N - n)
        rows = expanded_rows(product, layout, slot, K, first + n, count, scratch)
        dots(F, rows, K * 4, K, count, block, carry, x, K, xi, out, width, oi, first + n, j0, j1)
    return 0
