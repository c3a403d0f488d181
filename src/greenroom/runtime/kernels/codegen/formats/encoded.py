"""Products with encoded matrices: `product` multiplies rows of weights that it expands itself.

A lane of a vector sums what it sums in `dot` of ir.py, in the same order: the result has the bits
of the same weights expanded to the model's type beforehand.

By integers weights are not rounded to the model's type. A row of x is turned
into integers once (packing.py), codes are integers already (codes.py). A 4-bit weight takes a
fourth of the instructions that expanding it to float32 takes. Where x is a number of bfloat16 that
is not 64 times smaller than its largest neighbour the sums are those of exact weights and inputs;
others are rounded to 2^-15 of that neighbour.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.formats.expand import GROUP, STARTS
from greenroom.runtime.kernels.codegen.formats.packing import pack, powers_at
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.formats.tile import (
    UNIT,
    integer_1,
    integer_4,
    inverse,
    named,
    tile,
)
from greenroom.runtime.kernels.codegen.llvm.ir import (
    address_of,
    bits_of,
    dot_1x1,
    enter_at,
    get,
    put_word,
    word,
)
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS
from greenroom.runtime.kernels.codegen.llvm.values import in_turns, outlined

F = np.float32(0)

# The words of `product`: addresses of a slot, of the layout's words, of one row of x [K] (0: the
# weights are written to `out`), of `out` and of memory that it may use: 5 K bytes; of codes that
# are wanted after the last row's.
FRAME_WORDS = 16
(
    F_SLOT, F_LAYOUT, F_INPUTS, F_FIRST, F_ROWS, F_BLOCK, F_CARRY, F_X, F_OUT, F_SCRATCH, F_NEXT,
) = range(11)  # fmt: skip

# The words of a matrix's layout: bytes from the slot's start to the codes, and from row to row; the
# same of the scales; groups of 32 inputs that share a scale, and rows that do; bytes that a row of
# x takes where the product wants it packed (see packing.py), else 0.
LAYOUT_WORDS = 7
L_CODES, L_ROW, L_SCALE, L_SCALE_ROW, L_SHARE, L_ROWS, L_PACKED = range(LAYOUT_WORDS)


def _prepare(multiplied):
    """`prepare(encoding, codes, scale, ready, inputs, share, powers)`: write a row's scales.

    They are float32, `inputs / 4` bytes at most, and are multiplied by `powers` or as they are.
    """

    @intrinsic(prefer_literal=True)
    def prepare(typingctx, encoding, codes, scale, ready, inputs, share, powers):
        name, expander = named(encoding)

        def emit(codes, scale, ready, inputs, share, powers):
            expander.prepare(
                Row(codes, ready, inputs, scale, share, powers if multiplied else None)
            )

        signature = types.void(encoding, *[types.int64] * 6)
        return outlined(signature, f"prepare{'_times' * multiplied}.{name}", emit)

    return prepare


prepare, prepare_times = _prepare(False), _prepare(True)


@intrinsic(prefer_literal=True)
def expand(typingctx, encoding, kind, codes, ready, K, out):
    """Write a row's K weights as float32; its scales are ready."""
    name, expander = named(encoding)
    kind = types.unliteral(kind)

    def emit(codes, ready, K, out):
        row, back = Row(codes, ready, K), inverse(expander.order)

        def unit(at, left):
            for half in range(2 if left is None else 1):
                for start, weights in zip(STARTS, expander.group(kind, row, at, half), strict=True):
                    place = out + (at << 2) + 4 * (GROUP * half + start)
                    place.store(weights.pick(back))

        in_turns(K, UNIT, unit)

    return outlined(types.void(encoding, kind, *[types.int64] * 4), f"expand.{name}", emit)


@njit(error_model="numpy")
def any_bits(scales, step, count, mask):
    """The bits of a mask that are set in any of COLUMNS rows of float32 scales."""
    found = np.int32(0)
    for i in range(COLUMNS):
        for g in range(count):
            found |= bits_of(get(F, scales + i * step, g))
    return found & mask


@njit(inline="always")
def shared_by(row, together):
    """The number of a row of scales; a division takes as long as half a row of 4-bit codes."""
    return row if together == 1 else row // together


def product(kind, encoding, mask, integers):
    """Rows first..first + rows of a matrix times x [K], or the rows expanded: float32 [rows, K].

    `encoding` is a number of `NAMES`. Where no scale has a bit of `mask` (0: not looked at), its
    products with codes are numbers of the model's type already, and are not rounded.

    integers: multiply by integers; x is packed. No rows: pack x into `out`.

    A body that a wave calls; its one argument is described above.
    """

    def enter(pointer):
        p = address_of(pointer)
        layout, K, scratch = word(p, F_LAYOUT), word(p, F_INPUTS), word(p, F_SCRATCH)
        first, rows = word(p, F_FIRST), word(p, F_ROWS)
        block, carry = word(p, F_BLOCK), word(p, F_CARRY)
        x, out = word(p, F_X), word(p, F_OUT)
        if integers:
            if rows == 0:
                pack(encoding, x, K, out)
                return
            powers = powers_at(encoding, x, K)
        ld, step = word(layout, L_ROW), K // 4 + 64
        codes = word(p, F_SLOT) + word(layout, L_CODES) + first * ld
        scales, apart = word(p, F_SLOT) + word(layout, L_SCALE), word(layout, L_SCALE_ROW)
        share, together = word(layout, L_SHARE), word(layout, L_ROWS)
        n = 0
        while n < rows:
            count = COLUMNS if rows - n >= COLUMNS and x != 0 else 1
            w, y = codes + n * ld, out + 4 * n
            ahead = w + COLUMNS * ld if n + COLUMNS < rows else word(p, F_NEXT)
            for i in range(count):
                scale, ready = shared_by(first + n + i, together) * apart, scratch + i * step
                if integers and x != 0:
                    prepare_times(encoding, w + i * ld, scales + scale, ready, K, share, powers)
                    continue
                prepare(encoding, w + i * ld, scales + scale, ready, K, share, 0)
            if x == 0:
                expand(encoding, kind, w, scratch, K, out + 4 * n * K)
            elif integers:
                if count == 1:
                    integer_1(encoding, w, ld, w + ld, scratch, step, K, block, carry, x, y)
                else:
                    integer_4(encoding, w, ld, ahead, scratch, step, K, block, carry, x, y)
            elif count == 1:
                weights = scratch + step
                expand(encoding, kind, w, scratch, K, weights)
                dot_1x1(F, F, weights, 4 * K, K, block, carry, (x,), (y,))
            elif mask != 0 and any_bits(scratch, step, K // GROUP, np.int32(mask)) == 0:
                tile(encoding, F, w, ld, ahead, scratch, step, K, block, carry, x, y)
            else:
                tile(encoding, kind, w, ld, ahead, scratch, step, K, block, carry, x, y)
            n += count

    return enter


@njit(inline="always")
def one_row(
    product, layout, slot, K, first, rows, block, carry, x, out, scratch, packed, after
):  # fmt: skip
    """out[:rows] (+)= rows first.. of an encoded matrix times one row x [K]; both float32.

    `scratch` is room for the frame, for x as the product wants it packed, and for 5 K bytes.
    `packed` is the address of the row that lies packed there for this product (0: none); returns
    that address as it is afterwards. Codes at `after` come next.
    """
    place = (scratch + 8 * FRAME_WORDS + 63) & -64
    room = word(layout, L_PACKED)
    put_word(scratch, F_SLOT, slot)
    put_word(scratch, F_LAYOUT, layout)
    put_word(scratch, F_INPUTS, K)
    put_word(scratch, F_BLOCK, block)
    put_word(scratch, F_CARRY, carry)
    put_word(scratch, F_FIRST, first)
    put_word(scratch, F_NEXT, after)
    put_word(scratch, F_X, x)
    if room != 0 and packed != x:
        put_word(scratch, F_ROWS, 0)
        put_word(scratch, F_OUT, place)
        enter_at(product, scratch)
    if room != 0:
        put_word(scratch, F_X, place)
    put_word(scratch, F_ROWS, rows)
    put_word(scratch, F_OUT, out)
    put_word(scratch, F_SCRATCH, place + room)
    enter_at(product, scratch)
    return x if room != 0 else 0


@njit(inline="always")
def expanded_rows(product, layout, slot, K, first, rows, scratch):
    """Rows first.. of an encoded matrix as float32 [rows, K]; returns where in `scratch` they lie.

    That is room for the frame, these rows, and 5 K bytes.
    """
    place = (scratch + 8 * FRAME_WORDS + 63) & -64
    put_word(scratch, F_SLOT, slot)
    put_word(scratch, F_LAYOUT, layout)
    put_word(scratch, F_INPUTS, K)
    put_word(scratch, F_FIRST, first)
    put_word(scratch, F_ROWS, rows)
    put_word(scratch, F_X, 0)
    put_word(scratch, F_OUT, place)
    put_word(scratch, F_SCRATCH, place + 4 * rows * K)
    enter_at(product, scratch)
    return place
