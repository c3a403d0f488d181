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
from greenroom.runtime.kernels.layers import UNIT, F, multiply, normalise

# The words of `project`; four a head follow them: weight, bias, norm's weight (0: none), rotated?
(
    X, HIDDEN, Q_HEADS, KV_HEADS, WIDTH, SCRATCH, Q_OUT, K_OUT, V_OUT, K_STEP, V_STEP, COS, SIN,
    ROTARY, EPS, STYLE,
) = range(1, 17)  # fmt: skip
PROJECT_WORDS, HEAD_WORDS = 17, 4

# The words of `attend`: strides in bytes, from head to head and from token to token.
(
    DONE, Q, K, V, K_HEAD, K_ROW, V_HEAD, V_ROW, CONTEXT, A_WIDTH, A_KV_HEADS, GROUP, SCALE, SCORES,
    MIXED, A_W, A_ROWS, A_BIAS, A_OUT,
) = range(1, 20)  # fmt: skip
ATTEND_WORDS = 20


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


def project(kind, stamp):
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
        while True:
            head = claim(p, 0, 1)
            if head >= queries + 2 * keys:
                return
            own = PROJECT_WORDS + HEAD_WORDS * head
            w, bias, norm = word(p, own), word(p, own + 1), word(p, own + 2)
            row, ld = word(p, SCRATCH) + 4 * head * width, columns * size
            for i in range(0, width, COLUMNS):
                dot_1x4(
                    kind, kind, w + i * ld, ld, columns, columns, 0,
                    (word(p, X),), (row + 4 * i,),
                )  # fmt: skip
            for i in range(width):
                v = get(F, row, i)
                if bias != 0:
                    v += get(kind, bias, i)
                put(F, row, i, rounded(kind, v))
            if norm != 0:
                normalise(kind, F, row, width, norm, eps, style, F, row)
            if word(p, own + 3) != 0:
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


def attend(kind, stamp):
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
        while True:
            unit = claim(p, 0, 1)
            if unit >= kv_heads:
                n0 = (unit - kv_heads) * UNIT
                if n0 >= word(p, A_ROWS):
                    return
                await_(p, DONE, kv_heads)
                multiply(
                    kind, word(p, A_W), word(p, A_BIAS), mixed, word(p, A_OUT), word(p, A_ROWS),
                    heads * width, n0, sums,
                )  # fmt: skip
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
