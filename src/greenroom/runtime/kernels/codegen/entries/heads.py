"""Compiled attention for one token: projections before the KV cache, attention after it.

The kernels `project` and `attend` run in a parallel region, like those of expert_group.py.
`project` rounds where separate linear, norm and rotary operations round; `attend` keeps scores and
sums in float32.
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
    multiply_encoded_rows,
    multiply_plain_rows,
    normalise,
    row_codes,
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

# Arguments of `project`, after the cursor. Five for each head follow: its matrix, the head's first
# row in it, bias, norm weight (both 0: none), is it rotated? K_STEP, V_STEP: bytes from head to
# head. Where matrices are encoded each thread takes a ticket for STRIDE bytes at MEMORY.
(
    X, HIDDEN, Q_HEADS, KV_HEADS, WIDTH, SCRATCH, Q_OUT, K_OUT, V_OUT, K_STEP, V_STEP, COS, SIN,
    ROTARY, EPS, STYLE, TICKET, MEMORY, STRIDE,
) = range(1, 20)  # fmt: skip
PROJECT_ARGUMENTS, HEAD_ARGUMENTS = 20, 5

# Arguments of `attend`, after the cursor. *_HEAD, *_ROW: bytes from head to head, token to token.
# GROUP: query heads that share a head of keys. A_W, A_ROWS, A_BIAS, A_OUT: output projection.
(
    DONE, Q, K, V, K_HEAD, K_ROW, V_HEAD, V_ROW, CONTEXT, A_WIDTH, A_KV_HEADS, GROUP, SCALE, SCORES,
    MIXED, A_W, A_ROWS, A_BIAS, A_OUT, A_TICKET, A_MEMORY, A_STRIDE,
) = range(1, 23)  # fmt: skip
ATTEND_ARGUMENTS = 23


@njit(inline="always")
def rotate(kind, row, cos, sin, width):
    """Apply rotary position embedding to a float32 row in place, rounding as torch does.

    The first `width` elements are rotated; element i forms a pair with element width / 2 + i.
    """
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
    """Return the address of the code that multiplies an attention head's encoded weights."""
    return word(word(p, PROJECT_ARGUMENTS + HEAD_ARGUMENTS * head), M_PRODUCT)


@njit(inline="always")
def head_codes(p, head):
    """Return the address of an attention head's rows in an encoded weight matrix."""
    offset = PROJECT_ARGUMENTS + HEAD_ARGUMENTS * head
    return row_codes(word(p, offset), word(p, offset + 1))


@njit(inline="always")
def finish_head(kind, p, head, row):
    """Apply bias, norm and rotation to an attention head's projection, and store it.

    `row` is the address of the projection in float32, `p` that of the arguments of `project`.
    """
    size, width = size_of(kind), word(p, WIDTH)
    queries, keys, rotary = word(p, Q_HEADS), word(p, KV_HEADS), word(p, ROTARY)
    eps, style = float_of(np.int32(word(p, EPS))), word(p, STYLE)
    offset = PROJECT_ARGUMENTS + HEAD_ARGUMENTS * head
    bias, norm = word(p, offset + 2), word(p, offset + 3)
    for i in range(width):
        v = get(F, row, i)
        if bias != 0:
            v += get(kind, bias, i)
        put(F, row, i, rounded(kind, v))
    if norm != 0:
        normalise(kind, F, row, width, norm, eps, style, F, row)
    if word(p, offset + 4) != 0:
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
    """Make a kernel that computes one token's queries, keys and values.

    Bias, norm and rotation are applied. Each thread claims one attention head at a time, with a
    weight matrix [width, hidden]. Queries are written as [heads, width]; the heads of keys and
    values may be any number of bytes apart.
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
            offset, row = (
                PROJECT_ARGUMENTS + HEAD_ARGUMENTS * head,
                word(p, SCRATCH) + 4 * head * width,
            )
            matrix, first = word(p, offset), word(p, offset + 1)
            if by_code:
                if product_of(p, head) != product:
                    product, packed = product_of(p, head), 0
                after = head_codes(p, min(word(p, 0), heads - 1))
                packed = multiply_encoded_rows(
                    matrix, first, width, columns, wide, row, wide + 4 * columns, packed, after
                )  # fmt: skip
            else:
                multiply_plain_rows(kind, matrix, first, width, columns, word(p, X), row)
            finish_head(kind, p, head, row)

    return enter


def project_rows(kind, by_code):
    """Make a kernel that computes several tokens' queries, keys and values.

    It does for several tokens what `project` does for one, but reads each weight once, and converts
    an unencoded weight to float32 once.
    """

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
            offset, row = (
                PROJECT_ARGUMENTS + HEAD_ARGUMENTS * head,
                word(p, R_OUT) + 4 * head * width,
            )
            matrix, first = word(leader, offset), word(leader, offset + 1)
            if by_code:
                after = head_codes(leader, min(word(p, 0), heads - 1))
                for token in range(tokens):
                    multiply_encoded_rows(
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
def attend_key_head(kind, p, unit):
    """Compute the attention of the query heads that share one key head.

    `p` is the address of the arguments of `attend`, `unit` the number of the key head.
    """
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
    tiled = context - context % COLUMNS
    for t in range(0, tiled, COLUMNS):
        for j in range(group):
            out_of = (scores + 4 * (j * context + t),)
            dot_1x4(kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of)
    for t in range(tiled, context):
        for j in range(group):
            out_of = (scores + 4 * (j * context + t),)
            dot_1x1(kind, F, keys + t * ld, ld, width, width, 0, (x + 4 * j * width,), out_of)
    for j in range(group):  # the sums overwrite the queries
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
    """Make a kernel that computes one token's attention, then the output projection.

    The inputs are q [heads, width], k and v [key heads, context, width]. Each thread claims one key
    head at a time, with the query heads that share it. After all heads, each thread claims a range
    of outputs of the output projection at a time, and adds the bias.

    The argument SCORES is the address of scratch memory in float32: [heads, context], then twice
    [heads, width], then [key heads, width].
    """

    def enter(pointer):
        p = address_of(pointer)
        sums, kv_heads, size = stack(), word(p, A_KV_HEADS), size_of(kind)
        columns, wide, packed = kv_heads * word(p, GROUP) * word(p, A_WIDTH), 0, 0
        while True:
            unit = claim(p, 0, 1)
            if unit < kv_heads:
                attend_key_head(kind, p, unit)
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
                after = row_codes(word(p, A_W), (word(p, 0) - kv_heads) * UNIT)
                packed = multiply_encoded_rows(
                    word(p, A_W), n0, n, columns, wide, sums, wide + 4 * columns, packed, after
                )  # fmt: skip
            else:
                multiply_plain_rows(kind, word(p, A_W), n0, n, columns, word(p, MIXED), sums)
            if bias != 0:
                bias += n0 * size
            store(kind, sums, bias, word(p, A_OUT) + n0 * size, n)

    return enter


def attend_rows(kind, by_code):
    """Make a kernel that computes several tokens' attention and output projection.

    Each token has its own context. The projection's weights are read once for all tokens; unencoded
    weights are also converted to float32 once.
    """

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
                token_arguments = word(p, R_FIRST + token)
                attend_key_head(kind, token_arguments, head)
                mixed = word(token_arguments, MIXED)
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
                after = row_codes(w, (word(p, 0) - tokens * kv_heads) * UNIT)
                for token in range(tokens):
                    multiply_encoded_rows(
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
