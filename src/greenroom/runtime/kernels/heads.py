"""Compiled attention for one token: `project` before the KV cache, `attend` after it.

Bodies of a parallel region as in compiled.py, made of the same products. `project` rounds where
separate linear, norm and rotary operations round; `attend` keeps scores and sums in float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.compiled import BLOCK, exp, panels
from greenroom.runtime.kernels.ir import (
    COLUMNS,
    address_of,
    await_,
    claim,
    dot_1x1,
    dot_1x4,
    float_of,
    get,
    put,
    rounded,
    size_of,
    stack,
    word,
)
from greenroom.runtime.kernels.layers import (
    M_PRODUCT,
    UNIT,
    F,
    coded_rows,
    codes_at,
    normalise,
    plain_rows,
    store,
    widen_row,
)

# The words of `project`; five a head follow them: matrix and its row where the head begins, bias,
# norm's weight (0: none), rotated? Where matrices are encoded each thread takes a ticket for
# `STRIDE` bytes at MEMORY.
(
    X, HIDDEN, Q_HEADS, KV_HEADS, WIDTH, SCRATCH, Q_OUT, K_OUT, V_OUT, K_STEP, V_STEP, COS, SIN,
    ROTARY, EPS, STYLE, TICKET, MEMORY, STRIDE,
) = range(1, 20)  # fmt: skip
PROJECT_WORDS, HEAD_WORDS = 20, 5

# The words of `attend`: strides in bytes, from head to head and from token to token.
(
    DONE, Q, K, V, K_HEAD, K_ROW, V_HEAD, V_ROW, CONTEXT, A_WIDTH, A_KV_HEADS, GROUP, SCALE, SCORES,
    MIXED, A_W, A_ROWS, A_BIAS, A_OUT, A_TICKET, A_MEMORY, A_STRIDE,
) = range(1, 23)  # fmt: skip
ATTEND_WORDS = 23


@njit(inline="always")
def rotate(kind, row, cos, sin, width):
    """Rotate the first `width` of a row of float32 in place, half against half, as torch rounds."""
    half = width // 2
    for i in range(half):
        a, b = get(F, row, i), get(F, row, half + i)
        first = rounded(kind, a * get(kind, cos, i)) + rounded(kind, -b * get(kind, sin, i))
        second = rounded(kind, b * get(kind, cos, half + i)) + rounded(
            kind, a * get(kind, sin, half + i)
        )
        put(F, row, i, rounded(kind, first))
        put(F, row, half + i, rounded(kind, second))


def project(kind, stamp, by_code):
    """Queries, keys and values of one token x [K]: a head's rows times x, bias, norm, rotation.

    A unit is a head: its weight is [WIDTH, HIDDEN], its result WIDTH values. Queries go to Q_OUT
    [Q_HEADS, WIDTH], keys and values where K_OUT and V_OUT point to, heads *_STEP bytes apart.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        size, columns, width = size_of(kind), word(p, HIDDEN), word(p, WIDTH)
        queries, keys, rotary = word(p, Q_HEADS), word(p, KV_HEADS), word(p, ROTARY)
        eps, style = float_of(np.int32(word(p, EPS))), word(p, STYLE)
        heads, packed, product = queries + 2 * keys, 0, 0
        if by_code:
            wide = word(p, MEMORY) + claim(p, TICKET, 1) * word(p, STRIDE)
            widen_row(kind, word(p, X), columns, wide)
            scratch = wide + 4 * columns
        while True:
            head = claim(p, 0, 1)
            if head >= heads:
                return
            own = PROJECT_WORDS + HEAD_WORDS * head
            matrix, first = word(p, own), word(p, own + 1)
            bias, norm = word(p, own + 2), word(p, own + 3)
            row = word(p, SCRATCH) + 4 * head * width
            if by_code:
                if word(matrix, M_PRODUCT) != product:
                    product, packed = word(matrix, M_PRODUCT), 0
                following = PROJECT_WORDS + HEAD_WORDS * min(word(p, 0), heads - 1)
                after = codes_at(word(p, following), word(p, following + 1))
                packed = coded_rows(
                    matrix, first, width, columns, wide, row, scratch, packed, after
                )  # fmt: skip
            else:
                plain_rows(kind, matrix, first, width, columns, word(p, X), row)
            for i in range(width):
                v = get(F, row, i)
                if bias != 0:
                    v += get(kind, bias, i)
                put(F, row, i, rounded(kind, v))
            if norm != 0:
                normalise(kind, F, row, width, norm, eps, style, F, row)
            if word(p, own + 4) != 0:
                rotate(kind, row, word(p, COS), word(p, SIN), rotary)
            if head < queries:
                out = word(p, Q_OUT) + head * width * size
            elif head < queries + keys:
                out = word(p, K_OUT) + (head - queries) * word(p, K_STEP)
            else:
                out = word(p, V_OUT) + (head - queries - keys) * word(p, V_STEP)
            for i in range(width):
                put(kind, out, i, get(F, row, i))

    return enter


@njit(inline="always")
def exponentials(row, n, scale):
    """exp(scale * (x - max)) in place over n float32; returns their sum, in four strands."""
    top = get(F, row, 0)
    for i in range(1, n):
        v = get(F, row, i)
        top = v if v > top else top
    for i in range(n):
        put(F, row, i, exp((get(F, row, i) - top) * scale))
    a = b = c = d = F
    whole = n - n % 4
    for i in range(0, whole, 4):
        a += get(F, row, i)
        b += get(F, row, i + 1)
        c += get(F, row, i + 2)
        d += get(F, row, i + 3)
    for i in range(whole, n):
        a += get(F, row, i)
    return (a + b) + (c + d)


def attend(kind, stamp, by_code):
    """One token's attention over its context, then the output projection.

    The first units are heads of keys, each with the GROUP heads of queries that share it: q
    [KV_HEADS * GROUP, WIDTH], k and v [KV_HEADS, CONTEXT, WIDTH]; SCORES has room for float32
    [heads, CONTEXT], then twice [heads, WIDTH], then [KV_HEADS, WIDTH]. MIXED [heads * WIDTH] is
    their result, which the other units multiply: out [ROWS] = MIXED @ w.T (+ bias).
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
        sums = stack()
        size, context, width = size_of(kind), word(p, CONTEXT), word(p, A_WIDTH)
        kv_heads, group = word(p, A_KV_HEADS), word(p, GROUP)
        scale = float_of(np.int32(word(p, SCALE)))
        heads, mixed = kv_heads * group, word(p, MIXED)
        columns, wide, packed = heads * width, 0, 0
        while True:
            unit = claim(p, 0, 1)
            if unit >= kv_heads:
                n0 = (unit - kv_heads) * UNIT
                if n0 >= word(p, A_ROWS):
                    return
                await_(p, DONE, kv_heads)
                n, bias = min(UNIT, word(p, A_ROWS) - n0), word(p, A_BIAS)
                if by_code:
                    if wide == 0:
                        wide = word(p, A_MEMORY) + claim(p, A_TICKET, 1) * word(p, A_STRIDE)
                        widen_row(kind, mixed, columns, wide)
                    after = codes_at(word(p, A_W), (word(p, 0) - kv_heads) * UNIT)
                    packed = coded_rows(
                        word(p, A_W), n0, n, columns, wide, sums, wide + 4 * columns, packed, after
                    )  # fmt: skip
                else:
                    plain_rows(kind, word(p, A_W), n0, n, columns, mixed, sums)
                if bias != 0:
                    bias += n0 * size
                store(kind, sums, bias, word(p, A_OUT) + n0 * size, n)
                continue
            first = unit * group
            scores = word(p, SCORES) + 4 * first * context
            x = word(p, SCORES) + 4 * (heads * context + first * width)
            out = x + 4 * heads * width
            cells = word(p, SCORES) + 4 * (heads * (context + 2 * width) + unit * width)
            q = word(p, Q) + first * width * size
            for i in range(group * width):
                put(F, x, i, get(kind, q, i))
            keys, ld = word(p, K) + unit * word(p, K_HEAD), word(p, K_ROW)
            whole = context - context % COLUMNS
            for t in range(0, whole, COLUMNS):
                for j in range(group):
                    out_of = (scores + 4 * (j * context + t),)
                    dot_1x4(
                        kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of
                    )  # fmt: skip
            for t in range(whole, context):
                for j in range(group):
                    out_of = (scores + 4 * (j * context + t),)
                    dot_1x1(
                        kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of
                    )  # fmt: skip
            for j in range(group):  # the sums take the place of the queries
                put(F, x, j, exponentials(scores + 4 * j * context, context, scale))
            for j in range(group):
                panels(
                    kind, word(p, V) + unit * word(p, V_HEAD), word(p, V_ROW), context, width,
                    BLOCK, 0, scores + 4 * j * context, out + 4 * j * width, cells,
                )  # fmt: skip
            for j in range(group):
                total, row = get(F, x, j), j * width
                for i in range(row, row + width):
                    put(kind, mixed, first * width + i, get(F, out, i) / total)
            claim(p, DONE, 1)

    return enter
