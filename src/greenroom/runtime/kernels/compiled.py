"""The experts' kernels: `wave` computes experts of a step from their slots, `combine` sums them.

Both are bodies of a parallel region: every thread enters with the address of one array of int64
words (named below), claims units of work with an atomic counter and leaves when
none is left. So a thread that the machine takes away for a while delays one unit, not the step.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.emit import COLUMNS, LANES, ROWS, STRIP
from greenroom.runtime.kernels.encoded import L_CODES, L_ROW, expanded_rows, one_row
from greenroom.runtime.kernels.gating import activate, finish
from greenroom.runtime.kernels.ir import (
    address_of,
    await_,
    axpy_1x1,
    axpy_many,
    claim,
    dot_1x1,
    dot_1x4,
    dot_many,
    float_of,
    get,
    panel_1,
    panel_8,
    put,
    rounded,
    row,
    size_of,
    word,
)

BLOCK = 64  # elements of the intermediate dimension that are summed on their own
FEW = 4  # rows up to which one by one is faster than widening encoded weights for all
MANY = 8  # rows from which an expert's weights are widened once and for all
GROUP = 16  # weight rows widened together
F = np.float32(0)

# The words of `wave`. APART: rows of an expert up to which encoded weights are multiplied with one
# at a time. Slots, experts and finished units (one each per expert) follow them.
WAVE_WORDS = 38
(
    CURSOR, TICKET, UP, DOWN, EXPERTS, ROUTED, ROUTED_EXPERTS, STARTS, TOKENS, ROWINDEX, CARRY, X,
    MID, ACT, OUT, SCRATCH, SCRATCH_STRIDE, BASE, STRIDE, UP_OFFSET, DOWN_OFFSET, HIDDEN, INNER,
    WIDTH, INTERLEAVED, BIAS, ACTIVATION, LIMIT, ALPHA, ROUNDS, UP_PRODUCT, UP_LAYOUT,
    DOWN_PRODUCT, DOWN_LAYOUT, UP_STEP, DOWN_STEP, NARROW, APART,
) = range(WAVE_WORDS)  # fmt: skip

# The words of `combine`.
(
    TOKENS_COUNT, HIDDEN_SIZE, C_ROUTED, C_EXPERTS, C_STARTS, C_TOKENS, C_ROWS, C_OUT, C_WEIGHTS,
    SUMS, RESULT, C_BIAS, C_ROUNDS, ROUND_PRODUCT, ROUND_SUM, C_NARROW,
) = range(1, 17)  # fmt: skip


@njit(error_model="numpy")
def dots(kind, w, ld, K, N, block, carry, x, xs, xi, out, outs, oi, column, j0, j1):
    """out[j, column:column + N] (+)= x[j] @ w.T; w: N rows of K elements, `ld` bytes apart."""
    out += 4 * column
    for j in range(j0, j1, ROWS):
        many = j1 - j >= ROWS
        whole = N - N % COLUMNS
        if many:
            x0, x1 = row(x, xi, j, xs), row(x, xi, j + 1, xs)
            o0, o1 = row(out, oi, j, outs), row(out, oi, j + 1, outs)
            if ROWS == 4:
                x2, x3 = row(x, xi, j + 2, xs), row(x, xi, j + 3, xs)
                o2, o3 = row(out, oi, j + 2, outs), row(out, oi, j + 3, outs)
                for n in range(0, whole, COLUMNS):
                    ends = (o0 + 4 * n, o1 + 4 * n, o2 + 4 * n, o3 + 4 * n)
                    dot_many(kind, F, w + n * ld, ld, K, block, carry, (x0, x1, x2, x3), ends)
            else:
                for n in range(0, whole, COLUMNS):
                    ends = (o0 + 4 * n, o1 + 4 * n)
                    dot_many(kind, F, w + n * ld, ld, K, block, carry, (x0, x1), ends)
        for i in range(j, min(j + ROWS, j1)):
            xa, oa = row(x, xi, i, xs), row(out, oi, i, outs)
            if not many:
                for n in range(0, whole, COLUMNS):
                    dot_1x4(kind, F, w + n * ld, ld, K, block, carry, (xa,), (oa + 4 * n,))
            for n in range(whole, N):
                dot_1x1(kind, F, w + n * ld, ld, K, block, carry, (xa,), (oa + 4 * n,))


@njit(error_model="numpy")
def panels(kind, w, ld, K, N, block, carry, x, out, cells):
    """out[:N] (+)= x[:K] @ w by long runs along the rows of w; N is a multiple of LANES.

    The tiles of `axpys` would touch a new page for every few cache lines.
    """
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
    """out[j, column:column + N] (+)= x[j] @ w; w: K rows, `ld` bytes apart, N columns used."""
    size = size_of(kind)
    out += 4 * column
    for j in range(j0, j1, ROWS):
        many = j1 - j >= ROWS
        step = STRIP * LANES if many else LANES
        whole = N - N % step
        if many:
            x0, x1 = row(x, xi, j, xs), row(x, xi, j + 1, xs)
            o0, o1 = row(out, oi, j, outs), row(out, oi, j + 1, outs)
            if ROWS == 4:
                x2, x3 = row(x, xi, j + 2, xs), row(x, xi, j + 3, xs)
                o2, o3 = row(out, oi, j + 2, outs), row(out, oi, j + 3, outs)
                for n in range(0, whole, step):
                    ends = (o0 + 4 * n, o1 + 4 * n, o2 + 4 * n, o3 + 4 * n)
                    axpy_many(kind, w + n * size, ld, K, block, carry, 0, (x0, x1, x2, x3), ends)
            else:
                for n in range(0, whole, step):
                    ends = (o0 + 4 * n, o1 + 4 * n)
                    axpy_many(kind, w + n * size, ld, K, block, carry, 0, (x0, x1), ends)
        for i in range(j, min(j + ROWS, j1)):
            xa, oa = row(x, xi, i, xs), row(out, oi, i, outs)
            if not many:
                panels(kind, w, ld, K, whole, block, carry, xa, oa, scratch)
            for n in range(whole, N, LANES):
                axpy_1x1(kind, w + n * size, ld, K, block, carry, N - n, (xa,), (oa + 4 * n,))


@njit(inline="always")
def plain(kind, w, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch):
    """Columns first..first + N of the product of rows j0..j1 of x with one expert's w [width, K].

    x and out are float32, K and `width` elements wide; their rows are found through the indices
    `xi` and `oi` (0: none).
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
def transposed(kind, w, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch):
    """As `plain`, for w [K, width]. Many rows share strips of w, widened block by block."""
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
def encoded(
    product, layout, slot, K, width, first, N, block, carry, x, xi, out, oi, j0, j1, scratch,
    packed, after, apart,
):  # fmt: skip
    """As `plain`, for a matrix that `product` expands (see encoded.py).

    Up to `apart` rows of x are multiplied one by one, with weights in registers: each has the bits
    that it has alone. For more, GROUP rows of weights at a time are written to the scratch memory.
    `packed` is the address of the row of x that lies packed there (0: none);
    returns that address as it is afterwards. Codes at `after` come next.
    """
    if j1 - j0 <= apart:
        for j in range(j0, j1):
            one, result = row(x, xi, j, K), row(out, oi, j, width) + 4 * first
            packed = one_row(
                product, layout, slot, K, first, N, block, carry, one, result, scratch, packed,
                after,
            )  # fmt: skip
        return packed
    for n in range(0, N, GROUP):
        count = min(GROUP, N - n)
        rows = expanded_rows(product, layout, slot, K, first + n, count, scratch)
        dots(F, rows, K * 4, K, count, block, carry, x, K, xi, out, width, oi, first + n, j0, j1)
    return 0


@njit(inline="always")
def entries(experts, starts, count, expert):
    """Which rows an expert computes: bisection of the step's ascending ids."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if word(experts, middle) < expert:
            low = middle + 1
        else:
            high = middle
    return word(starts, low), word(starts, low + 1)


@njit(inline="always")
def codes_of(p, unit, up_total, ups, downs, wide):
    """Where the codes of a unit of encoded matrices begin; `wide`: rows for each channel."""
    is_up = unit < up_total
    e = unit // ups if is_up else (unit - up_total) // downs
    e = min(e, word(p, EXPERTS) - 1)
    layout = word(p, UP_LAYOUT) if is_up else word(p, DOWN_LAYOUT)
    first = unit % ups * word(p, UP_STEP) * wide
    if not is_up:
        first = (unit - up_total) % downs * word(p, DOWN_STEP)
    slot = word(p, BASE) + word(p + 8 * WAVE_WORDS, e) * word(p, STRIDE)
    return slot + word(layout, L_CODES) + first * word(layout, L_ROW)


def wave(kind, stamp, by_columns, by_code):
    """A wave: for each expert the up projection's units, then the down projection's.

    Written as one function with one place for each product: Numba compiles what it calls again
    at every level of calls, and seconds of compilation are seconds of a first answer. For the
    same reason `by_columns` (are the matrices transposed?) and `by_code` (are any encoded?) are
    constants.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        scratch = word(p, SCRATCH) + claim(p, TICKET, 1) * word(p, SCRATCH_STRIDE)
        count, inner, hidden = word(p, EXPERTS), word(p, INNER), word(p, HIDDEN)
        width, code, rounds = word(p, WIDTH), word(p, ACTIVATION), word(p, ROUNDS)
        interleaved = word(p, INTERLEAVED)
        limit, alpha = float_of(np.int32(word(p, LIMIT))), float_of(np.int32(word(p, ALPHA)))
        mid, act, inputs = word(p, MID), word(p, ACT), word(p, X)
        if word(p, NARROW) != 0:  # one token, not yet widened: each thread does it for itself
            for i in range(hidden):
                put(F, scratch, i, get(kind, inputs, i))
            inputs, scratch = scratch, scratch + 4 * hidden
        slots = p + 8 * WAVE_WORDS
        experts = slots + 8 * count
        done = experts + 8 * count
        pairs = 2 if width > inner else 1  # gate and up projection, or no gate
        up_step, down_step = word(p, UP_STEP), word(p, DOWN_STEP)
        ups = (inner + up_step - 1) // up_step
        downs = (hidden + down_step - 1) // down_step
        packed = 0
        up_total = count * ups * word(p, UP)
        total = up_total + count * downs * word(p, DOWN)
        while True:
            unit = claim(p, CURSOR, 1)
            if unit >= total:
                return
            is_up = unit < up_total
            if is_up:
                e, c0 = unit // ups, unit % ups * up_step
                c1 = min(c0 + up_step, inner)
                runs = 1 if interleaved != 0 else pairs
                first, n = c0 * (pairs // runs), (c1 - c0) * (pairs // runs)
                offset, K, columns = word(p, UP_OFFSET), hidden, width
                product, layout = word(p, UP_PRODUCT), word(p, UP_LAYOUT)
                block, carry = BLOCK if by_columns else hidden, 0
                x, xi, out, oi = inputs, word(p, TOKENS), mid, 0
            else:
                e, c0 = (unit - up_total) // downs, (unit - up_total) % downs * down_step
                if up_total != 0:
                    await_(done, e, ups)
                c1, runs = min(c0 + down_step, hidden), 1
                first, n = c0, c1 - c0
                offset, K, columns = word(p, DOWN_OFFSET), inner, hidden
                product, layout = word(p, DOWN_PRODUCT), word(p, DOWN_LAYOUT)
                block, carry = BLOCK, word(p, CARRY)
                x, xi, out, oi = act, 0, word(p, OUT), word(p, ROWINDEX)
            expert = word(experts, e)
            slot = word(p, BASE) + word(slots, e) * word(p, STRIDE)
            w = slot + offset
            j0, j1 = entries(word(p, ROUTED_EXPERTS), word(p, STARTS), word(p, ROUTED), expert)
            for run in range(runs):
                at = first + run * inner
                if by_code:
                    after = slot + word(layout, L_CODES) + (at + inner) * word(layout, L_ROW)
                    if run == runs - 1:
                        after = codes_of(p, word(p, CURSOR), up_total, ups, downs, pairs // runs)
                    packed = encoded(
                        product, layout, slot, K, columns, at, n, block, carry, x, xi, out, oi,
                        j0, j1, scratch, packed, after, word(p, APART),
                    )  # fmt: skip
                elif by_columns:
                    transposed(
                        kind, w, K, columns, at, n, block, carry, x, xi, out, oi, j0, j1, scratch
                    )  # fmt: skip
                else:
                    plain(
                        kind, w, K, columns, at, n, block, carry, x, xi, out, oi, j0, j1, scratch
                    )  # fmt: skip
            if not is_up:
                continue
            for j in range(j0, j1):
                for run in range(runs):
                    at = first + run * inner
                    bias = word(p, BIAS)
                    if bias != 0:
                        bias += (expert * width + at) * size_of(kind)
                    finish(kind, mid + 4 * (j * width + at), bias, n, rounds)
                gate, paired = mid + 4 * (j * width + first), interleaved != 0
                up = gate + 4 * (1 if paired else inner * (pairs - 1))
                out = act + 4 * (j * inner + c0)
                activate(kind, code, gate, up, paired, out, c1 - c0, limit, alpha)
            claim(done, e, 1)

    return enter


def combine(kind, stamp):
    """Round the experts' sums, add their biases, weight them and add them up, by ascending id."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        tokens, hidden = word(p, TOKENS_COUNT), word(p, HIDDEN_SIZE)
        routed, experts, starts = word(p, C_ROUTED), word(p, C_EXPERTS), word(p, C_STARTS)
        token_of, row_of = word(p, C_TOKENS), word(p, C_ROWS)
        out, weights, sums, result = (
            word(p, C_OUT),
            word(p, C_WEIGHTS),
            word(p, SUMS),
            word(p, RESULT),
        )
        bias, rounds = word(p, C_BIAS), word(p, C_ROUNDS)
        round_product, round_sum = word(p, ROUND_PRODUCT), word(p, ROUND_SUM)
        narrow = word(p, C_NARROW) != 0
        size = size_of(kind)
        while True:
            c0 = claim(p, 0, 1) * 256
            if c0 >= hidden:
                return
            n = min(256, hidden - c0)
            for t in range(tokens):
                for c in range(n):
                    put(F, sums + 4 * (t * hidden + c0), c, F)
            for i in range(routed):
                expert = word(experts, i)
                for j in range(word(starts, i), word(starts, i + 1)):
                    y = out + 4 * (word(row_of, j) * hidden + c0)
                    b = bias + size * (expert * hidden + c0) if bias != 0 else 0
                    finish(kind, y, b, n, rounds)
                    total = sums + 4 * (word(token_of, j) * hidden + c0)
                    weight = (
                        get(kind, weights, word(row_of, j))
                        if narrow
                        else get(F, weights, word(row_of, j))
                    )
                    if round_product and round_sum:
                        for c in range(n):
                            v = rounded(kind, get(F, y, c) * weight)
                            put(F, total, c, rounded(kind, get(F, total, c) + v))
                    elif round_product:
                        for c in range(n):
                            v = rounded(kind, get(F, y, c) * weight)
                            put(F, total, c, get(F, total, c) + v)
                    else:
                        for c in range(n):
                            v = get(F, y, c) * weight
                            put(F, total, c, get(F, total, c) + v)
            for t in range(tokens):
                for c in range(n):
                    v = get(F, sums + 4 * (t * hidden + c0), c)
                    put(kind, result + size * (t * hidden + c0), c, v)

    return enter
