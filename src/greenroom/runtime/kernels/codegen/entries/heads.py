"""Compiled attention for one token: `project` before the KV cache, `attend` after it.

Bodies of a parallel region as in compiled.py, made of the same products. `project` rounds where
separate linear, norm and rotary operations round; `attend` keeps scores and sums in float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.layers import (
    M_PRODUCT,
    R_COUNT,
    R_DONE,
    R_FIRST,
    R_OUT,
    R_WIDE,
    UNIT,
    F,
    coded_rows,
    codes_at,
    normalise,
    plain_rows,
    store,
    widen_row,
)
from greenroom.runtime.kernels.codegen.entries.products import BLOCK, dots, panels
from greenroom.runtime.kernels.codegen.llvm.ir import (
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
from greenroom.runtime.kernels.codegen.llvm.lanes import exponentials

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


@njit(inline="always")
def product_of(p, head):
    """The product of a head's matrix, where matrices are encoded."""
    return word(word(p, PROJECT_WORDS + HEAD_WORDS * head), M_PRODUCT)


@njit(inline="always")
def head_codes(p, head):
    """Where the codes of a head's rows lie."""
    own = PROJECT_WORDS + HEAD_WORDS * head
    return codes_at(word(p, own), word(p, own + 1))


@njit(inline="always")
def finish_head(kind, p, head, row):
    """Bias, norm and rotation of a head whose product is at `row`, with the words at p."""
    size, width = size_of(kind), word(p, WIDTH)
    queries, keys, rotary = word(p, Q_HEADS), word(p, KV_HEADS), word(p, ROTARY)
    eps, style = float_of(np.int32(word(p, EPS))), word(p, STYLE)
    own = PROJECT_WORDS + HEAD_WORDS * head
    bias, norm = word(p, own + 2), word(p, own + 3)
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


def project(kind, by_code):
    """Queries, keys and values of one token x [K]: a head's rows times x, bias, norm, rotation.

    A unit is a head: its weight is [WIDTH, HIDDEN], its result WIDTH values. Queries go to Q_OUT
    [Q_HEADS, WIDTH], keys and values where K_OUT and V_OUT point to, heads *_STEP bytes apart.
    """

    def enter(pointer):
        p = address_of(pointer)
        heads = word(p, Q_HEADS) + 2 * word(p, KV_HEADS)
        columns, width, packed, product = word(p, HIDDEN), word(p, WIDTH), 0, 0
        if by_code:
            wide = word(p, MEMORY) + claim(p, TICKET, 1) * word(p, STRIDE)
            widen_row(kind, word(p, X), columns, wide)
        while True:
            head = claim(p, 0, 1)
            if head >= heads:
                return
            own, row = PROJECT_WORDS + HEAD_WORDS * head, word(p, SCRATCH) + 4 * head * width
            matrix, first = word(p, own), word(p, own + 1)
            if by_code:
                if product_of(p, head) != product:
                    product, packed = product_of(p, head), 0
                after = head_codes(p, min(word(p, 0), heads - 1))
                packed = coded_rows(
                    matrix, first, width, columns, wide, row, wide + 4 * columns, packed, after
                )  # fmt: skip
            else:
                plain_rows(kind, matrix, first, width, columns, word(p, X), row)
            finish_head(kind, p, head, row)

    return enter


def project_rows(kind, by_code):
    """`project` for several tokens: a head's weight is read once for all of them, and widened once
    where it is plain."""

    def enter(pointer):
        p = address_of(pointer)
        leader, tokens, wide = word(p, R_FIRST), word(p, R_COUNT), word(p, R_WIDE)
        heads = word(leader, Q_HEADS) + 2 * word(leader, KV_HEADS)
        columns, width = word(leader, HIDDEN), word(leader, WIDTH)
        step = heads * width
        if by_code:
            scratch = word(leader, MEMORY) + claim(leader, TICKET, 1) * word(leader, STRIDE)
        while True:
            head = claim(p, 0, 1)
            if head >= heads:
                return
            own, row = PROJECT_WORDS + HEAD_WORDS * head, word(p, R_OUT) + 4 * head * width
            matrix, first = word(leader, own), word(leader, own + 1)
            if by_code:
                after = head_codes(leader, min(word(p, 0), heads - 1))
                for token in range(tokens):
                    coded_rows(
                        matrix, first, width, columns, wide + 4 * token * columns,
                        row + 4 * token * step, scratch, 0, after,
                    )  # fmt: skip
            else:
                ld = columns * size_of(kind)
                dots(
                    kind, matrix + first * ld, ld, columns, width, columns, 0,
                    wide, columns, 0, word(p, R_OUT), step, 0, head * width, 0, tokens,
                )  # fmt: skip
            for token in range(tokens):
                finish_head(kind, word(p, R_FIRST + token), head, row + 4 * token * step)

    return enter


@njit(inline="always")
def attend_heads(kind, p, unit):
    """One head of keys of `attend`, and the queries that share it, with the words at p."""
    size, context, width = size_of(kind), word(p, CONTEXT), word(p, A_WIDTH)
    kv_heads, group = word(p, A_KV_HEADS), word(p, GROUP)
    scale = float_of(np.int32(word(p, SCALE)))
    heads, mixed = kv_heads * group, word(p, MIXED)
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
            dot_1x4(kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of)
    for t in range(whole, context):
        for j in range(group):
            out_of = (scores + 4 * (j * context + t),)
            dot_1x1(kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of)
    for j in range(group):  # the sums take the place of the queries
        row = scores + 4 * j * context
        put(F, x, j, exponentials(F, context, row, scale, row))
    for j in range(group):
        panels(
            kind, word(p, V) + unit * word(p, V_HEAD), word(p, V_ROW), context, width,
            BLOCK, 0, scores + 4 * j * context, out + 4 * j * width, cells,
        )  # fmt: skip
    for j in range(group):
        total, row = get(F, x, j), j * width
        for i in range(row, row + width):
            put(kind, mixed, first * width + i, get(F, out, i) / total)


def attend(kind, by_code):
    """One token's attention over its context, then the output projection.

    The first units are heads of keys, each with the GROUP heads of queries that share it: q
    [KV_HEADS * GROUP, WIDTH], k and v [KV_HEADS, CONTEXT, WIDTH]; SCORES has room for float32
    [heads, CONTEXT], then twice [heads, WIDTH], then [KV_HEADS, WIDTH]. MIXED [heads * WIDTH] is
    their result, which the other units multiply: out [ROWS] = MIXED @ w.T (+ bias).
    """

    def enter(pointer):
        p = address_of(pointer)
        sums, kv_heads, size = stack(), word(p, A_KV_HEADS), size_of(kind)
        columns, wide, packed = kv_heads * word(p, GROUP) * word(p, A_WIDTH), 0, 0
        while True:
            unit = claim(p, 0, 1)
            if unit < kv_heads:
                attend_heads(kind, p, unit)
                claim(p, DONE, 1)
                continue
            n0 = (unit - kv_heads) * UNIT
            if n0 >= word(p, A_ROWS):
                return
            await_(p, DONE, kv_heads)
            n, bias = min(UNIT, word(p, A_ROWS) - n0), word(p, A_BIAS)
            if by_code:
                if wide == 0:
                    wide = word(p, A_MEMORY) + claim(p, A_TICKET, 1) * word(p, A_STRIDE)
                    widen_row(kind, word(p, MIXED), columns, wide)
                after = codes_at(word(p, A_W), (word(p, 0) - kv_heads) * UNIT)
                packed = coded_rows(
                    word(p, A_W), n0, n, columns, wide, sums, wide + 4 * columns, packed, after
                )  # fmt: skip
            else:
                plain_rows(kind, word(p, A_W), n0, n, columns, word(p, MIXED), sums)
            if bias != 0:
                bias += n0 * size
            store(kind, sums, bias, word(p, A_OUT) + n0 * size, n)

    return enter


def attend_rows(kind, by_code):
    """`attend` for several tokens, each over its own context: the projection's weight is read once
    for all of them, and widened once where it is plain."""

    def enter(pointer):
        p = address_of(pointer)
        first, tokens, size = word(p, R_FIRST), word(p, R_COUNT), size_of(kind)
        kv_heads, wide, sums = word(first, A_KV_HEADS), word(p, R_WIDE), word(p, R_OUT)
        of_a_head = word(first, GROUP) * word(first, A_WIDTH)
        columns, rows, scratch = kv_heads * of_a_head, word(first, A_ROWS), 0
        while True:
            unit = claim(p, 0, 1)
            if unit < tokens * kv_heads:
                token, head = unit // kv_heads, unit % kv_heads
                own = word(p, R_FIRST + token)
                attend_heads(kind, own, head)
                mixed = word(own, MIXED)
                for i in range(head * of_a_head, (head + 1) * of_a_head):
                    put(F, wide + 4 * token * columns, i, get(kind, mixed, i))
                claim(p, R_DONE, 1)
                continue
            n0 = (unit - tokens * kv_heads) * UNIT
            if n0 >= rows:
                return
            await_(p, R_DONE, tokens * kv_heads)
            n, w, bias = min(UNIT, rows - n0), word(first, A_W), word(first, A_BIAS)
            if by_code:
                if scratch == 0:
                    ticket = claim(first, A_TICKET, 1)
                    scratch = word(first, A_MEMORY) + ticket * word(first, A_STRIDE)
                after = codes_at(w, (word(p, 0) - tokens * kv_heads) * UNIT)
                for token in range(tokens):
                    coded_rows(
                        w, n0, n, columns, wide + 4 * token * columns,
                        sums + 4 * (token * rows + n0), scratch, 0, after,
                    )  # fmt: skip
            else:
                ld = columns * size
                dots(
                    kind, w + n0 * ld, ld, columns, n, columns, 0,
                    wide, columns, 0, sums, rows, 0, n0, 0, tokens,
                )  # fmt: skip
            if bias != 0:
                bias += n0 * size
            for token in range(tokens):
                out = word(word(p, R_FIRST + token), A_OUT) + n0 * size
                store(kind, sums + 4 * (token * rows + n0), bias, out, n)

    return enter
