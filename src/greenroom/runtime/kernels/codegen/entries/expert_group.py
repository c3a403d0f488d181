"""Compiled kernels that compute a group of experts and sum experts' outputs.

Both run in an OpenMP parallel region. Every thread enters with the address of one array of int64
arguments, which this file names, claims ranges of channels with an atomic counter and leaves when
no range is left. So a thread that loses its core for a while delays one range, not the whole
computation.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.gating import activate, round_and_add_bias
from greenroom.runtime.kernels.codegen.entries.products import (
    BLOCK,
    F,
    multiply_encoded,
    multiply_plain,
    multiply_transposed,
)
from greenroom.runtime.kernels.codegen.formats.encoded import L_CODES, L_ROW
from greenroom.runtime.kernels.codegen.llvm.ir import (
    address_of,
    await_,
    claim,
    float_of,
    get,
    put,
    size_of,
    word,
)
from greenroom.runtime.kernels.codegen.llvm.lanes import over_rows

# Arguments of `compute_group`. UP, DOWN: is that projection computed? EXPERTS: their number. ROUTED
# to ROWINDEX: the step's `Routing`. Addresses of float32: MID, ACT, OUT (see `CpuStep`). BASE,
# STRIDE: slots; *_OFFSET: a matrix in its slot. *_PRODUCT, *_LAYOUT: see `MatrixProduct`; SECOND_*
# are those of the second run of an up projection's rows, the up rows after the gate rows. *_STEP:
# channels or columns of a unit. NARROW: is X one token of the model's type, not float32?
# SEQUENTIAL_ROWS: up to so many rows of an expert are multiplied with encoded weights one by one.
# Slots, experts and finished units follow, one int64 each per expert.
GROUP_ARGUMENTS = 40
(
    CURSOR, TICKET, UP, DOWN, EXPERTS, ROUTED, ROUTED_EXPERTS, STARTS, TOKENS, ROWINDEX, CARRY, X,
    MID, ACT, OUT, SCRATCH, SCRATCH_STRIDE, BASE, STRIDE, UP_OFFSET, DOWN_OFFSET, HIDDEN, INNER,
    WIDTH, INTERLEAVED, BIAS, ACTIVATION, LIMIT, ALPHA, ROUNDS, UP_PRODUCT, UP_LAYOUT,
    DOWN_PRODUCT, DOWN_LAYOUT, SECOND_PRODUCT, SECOND_LAYOUT, UP_STEP, DOWN_STEP, NARROW,
    SEQUENTIAL_ROWS,
) = range(GROUP_ARGUMENTS)  # fmt: skip

# Arguments of `combine`, after the cursor. C_BIAS: 0 where there is none.
(
    TOKENS_COUNT, HIDDEN_SIZE, C_ROUTED, C_EXPERTS, C_STARTS, C_TOKENS, C_ROWS, C_OUT, C_WEIGHTS,
    SUMS, RESULT, C_BIAS, C_ROUNDS, ROUND_PRODUCT, ROUND_SUM, C_NARROW,
) = range(1, 17)  # fmt: skip


@njit(inline="always")
def expert_rows(experts, starts, count, expert):
    """Find the input rows that are routed to an expert, by binary search.

    Expert ids are ascending. Return (first row, row after the last).
    """
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if word(experts, middle) < expert:
            low = middle + 1
        else:
            high = middle
    return word(starts, low), word(starts, low + 1)


@njit(inline="always")
def unit_codes(p, unit, up_total, ups, downs, wide):
    """Return the address of the encoded weights of one unit of work.

    A unit is a range of channels of one expert's up or down projection, which a thread computes at
    a time. `wide` is the number of consecutive matrix rows of one up-projection channel.
    """
    is_up = unit < up_total
    e = unit // ups if is_up else (unit - up_total) // downs
    e = min(e, word(p, EXPERTS) - 1)
    layout = word(p, UP_LAYOUT) if is_up else word(p, DOWN_LAYOUT)
    first = unit % ups * word(p, UP_STEP) * wide
    if not is_up:
        first = (unit - up_total) % downs * word(p, DOWN_STEP)
    slot = word(p, BASE) + word(p + 8 * GROUP_ARGUMENTS, e) * word(p, STRIDE)
    return slot + word(layout, L_CODES) + first * word(layout, L_ROW)


@njit(inline="always")
def unit_bounds(p, unit, up_total, ups, downs):
    """Return the expert, projection, channels and matrix rows of one unit of work.

    A unit is a range of channels of one expert's up or down projection, which a thread computes at
    a time. The result is (whether the projection is up, the expert's index in the group, the first
    channel, the channel after the last, the first matrix row, the number of matrix rows, the number
    of ranges of rows). Two ranges of rows are those of gate and up projection.
    """
    inner = word(p, INNER)
    if unit < up_total:
        pairs = 2 if word(p, WIDTH) > inner else 1  # gate and up projection, or no gate
        c0 = unit % ups * word(p, UP_STEP)
        c1 = min(c0 + word(p, UP_STEP), inner)
        runs = 1 if word(p, INTERLEAVED) != 0 else pairs
        return True, unit // ups, c0, c1, c0 * (pairs // runs), (c1 - c0) * (pairs // runs), runs
    c0 = (unit - up_total) % downs * word(p, DOWN_STEP)
    c1 = min(c0 + word(p, DOWN_STEP), word(p, HIDDEN))
    return False, (unit - up_total) // downs, c0, c1, c0, c1 - c0, 1


@njit(inline="always")
def up_operands(p, inputs):
    """Return the operands of an expert's up projection.

    They are (offset of the matrix in a slot, number of inputs, number of outputs), then the
    addresses of (product code, layout, x, row numbers of x, out, row numbers of out).
    """
    return (
        word(p, UP_OFFSET), word(p, HIDDEN), word(p, WIDTH), word(p, UP_PRODUCT),
        word(p, UP_LAYOUT), inputs, word(p, TOKENS), word(p, MID), 0,
    )  # fmt: skip


@njit(inline="always")
def down_operands(p):
    """Return the operands of an expert's down projection.

    They are (offset of the matrix in a slot, number of inputs, number of outputs), then the
    addresses of (product code, layout, x, row numbers of x, out, row numbers of out).
    """
    return (
        word(p, DOWN_OFFSET), word(p, INNER), word(p, HIDDEN), word(p, DOWN_PRODUCT),
        word(p, DOWN_LAYOUT), word(p, ACT), 0, word(p, OUT), word(p, ROWINDEX),
    )  # fmt: skip


@njit(inline="always")
def activate_unit(kind, p, expert, c0, c1, first, n, runs, j0, j1):
    """Round a part of an expert's up projection, add its bias and apply the activation.

    The part has channels c0 to c1 - 1 of rows j0 to j1 - 1.
    """
    inner, width, rounds = word(p, INNER), word(p, WIDTH), word(p, ROUNDS)
    limit, alpha = float_of(np.int32(word(p, LIMIT))), float_of(np.int32(word(p, ALPHA)))
    mid, paired = word(p, MID), word(p, INTERLEAVED) != 0
    for j in range(j0, j1):
        for run in range(runs):
            at = first + run * inner
            bias = word(p, BIAS)
            if bias != 0:
                bias += (expert * width + at) * size_of(kind)
            round_and_add_bias(kind, mid + 4 * (j * width + at), bias, n, rounds)
        gate = mid + 4 * (j * width + first)
        up = gate + 4 * (1 if paired else width - inner)
        out = word(p, ACT) + 4 * (j * inner + c0)
        activate(kind, word(p, ACTIVATION), gate, up, paired, out, c1 - c0, limit, alpha)


def compute_group(kind, by_columns, by_code):
    """Make a kernel that computes a group of experts: up projections, then down projections.

    Each thread claims one range of channels of one expert's projection at a time.

    by_columns: are the matrices transposed?
    by_code: is any of the matrices encoded?

    Both are constants of the compiled code. The code calls each matrix product in one place only,
    since it is inlined there: more code takes longer to compile before the first answer.
    """

    def enter(pointer):
        p = address_of(pointer)
        scratch = word(p, SCRATCH) + claim(p, TICKET, 1) * word(p, SCRATCH_STRIDE)
        count, inner, hidden, inputs = word(p, EXPERTS), word(p, INNER), word(p, HIDDEN), word(p, X)
        if word(p, NARROW) != 0:  # one token: each thread widens a copy of its own
            for i in range(hidden):
                put(F, scratch, i, get(kind, inputs, i))
            inputs, scratch = scratch, scratch + 4 * hidden
        slots = p + 8 * GROUP_ARGUMENTS
        experts, done = slots + 8 * count, slots + 16 * count
        ups = (inner + word(p, UP_STEP) - 1) // word(p, UP_STEP)
        downs = (hidden + word(p, DOWN_STEP) - 1) // word(p, DOWN_STEP)
        packed, packer, up_total = 0, 0, count * ups * word(p, UP)
        total = up_total + count * downs * word(p, DOWN)
        while True:
            unit = claim(p, CURSOR, 1)
            if unit >= total:
                return
            is_up, e, c0, c1, first, n, runs = unit_bounds(p, unit, up_total, ups, downs)
            if not is_up and up_total != 0:
                await_(done, e, ups)
            operands = up_operands(p, inputs) if is_up else down_operands(p)
            offset, K, columns, product, layout, x, xi, out, oi = operands
            block = BLOCK if by_columns or not is_up else hidden
            carry = 0 if is_up else word(p, CARRY)
            expert, slot = word(experts, e), word(p, BASE) + word(slots, e) * word(p, STRIDE)
            w = slot + offset
            j0, j1 = expert_rows(word(p, ROUTED_EXPERTS), word(p, STARTS), word(p, ROUTED), expert)
            for run in range(runs):
                at = first + run * inner
                if by_code:
                    second = word(p, SECOND_LAYOUT)
                    if run == 1:
                        product, layout = word(p, SECOND_PRODUCT), second
                    if product != packer:  # each product packs inputs in its own way
                        packed, packer = 0, product
                    after = slot + word(second, L_CODES) + (at + inner) * word(second, L_ROW)
                    if run == runs - 1:
                        wide = word(p, WIDTH) // inner // runs
                        after = unit_codes(p, word(p, CURSOR), up_total, ups, downs, wide)
                    packed = multiply_encoded(
                        product, layout, slot, K, columns, at, n, block, carry, x, xi, out, oi,
                        j0, j1, scratch, packed, after, word(p, SEQUENTIAL_ROWS),
                    )  # fmt: skip
                elif by_columns:
                    multiply_transposed(
                        kind, w, K, columns, at, n, block, carry, x, xi, out, oi, j0, j1, scratch
                    )  # fmt: skip
                else:
                    multiply_plain(
                        kind, w, K, columns, at, n, block, carry, x, xi, out, oi, j0, j1, scratch
                    )  # fmt: skip
            if is_up:
                activate_unit(kind, p, expert, c0, c1, first, n, runs, j0, j1)
                claim(done, e, 1)

    return enter


@over_rows("ff", "f", scalars=1)
def add(kind, total, y, weight):
    """Add a row of expert outputs, times its gate weight, to a row of sums."""
    return total + y * weight


@over_rows("ff", "f", scalars=1)
def add_rounded(kind, total, y, weight):
    """Add a row of expert outputs times its gate weight to sums, rounding the product."""
    return total + (y * weight).rounded(kind)


@over_rows("ff", "f", scalars=1)
def add_all_rounded(kind, total, y, weight):
    """Add weighted expert outputs to a row of sums, rounding the product and the sum."""
    return (total + (y * weight).rounded(kind)).rounded(kind)


def combine(kind):
    """Make a kernel that sums each token's weighted expert outputs, by ascending expert id.

    The kernel first rounds the outputs to the model's type and adds biases.
    """

    def enter(pointer):
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
                    round_and_add_bias(kind, y, b, n, rounds)
                    total = sums + 4 * (word(token_of, j) * hidden + c0)
                    at = word(row_of, j)
                    weight = get(kind, weights, at) if narrow else get(F, weights, at)
                    places = total, y, total
                    if round_product and round_sum:
                        add_all_rounded(kind, n, places, (weight,))
                    elif round_product:
                        add_rounded(kind, n, places, (weight,))
                    else:
                        add(kind, n, places, (weight,))
            for t in range(tokens):
                for c in range(n):
                    v = get(F, sums + 4 * (t * hidden + c0), c)
                    put(kind, result + size * (t * hidden + c0), c, v)

    return enter
