"""Compiled products with quantised weights that are decoded in registers.

Each lane of a vector sums the same products in the same order as `dot` of llvm/ir.py. So the result
is bit for bit that of weights which are decoded to the model's type beforehand.

Integer products do not round weights to the model's type. An input row is converted to integers
once (packing.py); codes are integers already (codes.py). A 4-bit weight then takes a fourth of the
instructions of decoding it to float32. Inputs that are bfloat16 numbers and at most 64 times
smaller than the largest of their neighbours are exact; smaller inputs are rounded to 2^-15 of that
neighbour.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from greenroom.core.layout import BLOCKS
from greenroom.runtime.kernels.codegen.formats.expand import GROUP, STARTS, Expander
from greenroom.runtime.kernels.codegen.formats.families import FORMATS
from greenroom.runtime.kernels.codegen.formats.packing import packing_code
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.formats.tile import UNIT, integer_tiles, inverse, tile_code
from greenroom.runtime.kernels.codegen.llvm.intrinsics import outlined
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
from greenroom.runtime.kernels.codegen.llvm.values import loop_in_units

F = np.float32(0)

# Arguments of `product`. Addresses: F_SLOT, F_LAYOUT (below), F_X (one row of x [F_INPUTS]; 0: the
# weights are written to F_OUT), F_OUT, F_SCRATCH (5 bytes an input) and F_NEXT (codes to prefetch
# after those of the last row).
FRAME_ARGUMENTS = 16
(
    F_SLOT, F_LAYOUT, F_INPUTS, F_FIRST, F_ROWS, F_BLOCK, F_CARRY, F_X, F_OUT, F_SCRATCH, F_NEXT,
) = range(11)  # fmt: skip

# A matrix's layout, int64: bytes from the slot's start to the codes, and from row to row; the same
# for the scales; groups of 32 inputs that share a scale, and rows that do; bytes of a packed row of
# x (packing.py), or 0 if the product takes x in float32; for the second tensor that is stored with
# the codes, bytes from the slot's start, and from row to row, and rows of codes to one of it; the
# same for the third, the groups of inputs.
LAYOUT_ARGUMENTS = 13
(
    L_CODES, L_ROW, L_SCALE, L_SCALE_ROW, L_SHARE, L_ROWS, L_PACKED, L_OTHER, L_OTHER_ROW,
    L_OTHER_ROWS, L_INDEX, L_INDEX_ROW, L_INDEX_ROWS,
) = range(LAYOUT_ARGUMENTS)  # fmt: skip


# Places of the addresses in a format (matrix.py).
PACK, MULTIPLY, EXPAND = range(3)


def preparing_code(encoding: str, expander: Expander, multiplied: bool):
    """Make the intrinsic that writes a row's scales and minima as float32.

    They take at most `inputs / 2` bytes.

    `multiplied`: the scales are multiplied by the float32 numbers at the address `powers`.
    """

    @intrinsic
    def prepare(typingctx, codes, scale, other, index, ready, inputs, share, powers):
        def emit(codes, scale, other, index, ready, inputs, share, powers):
            powers = powers if multiplied else None
            expander.prepare(Row(codes, ready, inputs, scale, share, powers, other, index))

        signature = types.void(*[types.int64] * 8)
        return outlined(signature, f"prepare{'_times' * multiplied}.{encoding}", emit)

    return prepare


def expanding_code(encoding: str, expander: Expander, remainder: bool):
    """Make the intrinsic that decodes one row of a quantised matrix to K float32 weights.

    Its argument `ready` is the address of the row's scales in float32. `remainder`: K may be no
    multiple of UNIT.
    """

    @intrinsic
    def expand(typingctx, kind, codes, ready, K, out):
        def emit(codes, ready, K, out):
            row, back = Row(codes, ready, K), inverse(expander.order)

            def unit(at, left):
                for half in range(2 if left is None else 1):
                    weights = expander.group(kind, row, at, half)
                    for start, values in zip(STARTS, weights, strict=True):
                        place = out + (at << 2) + 4 * (GROUP * half + start)
                        place.store(values.shuffle(back))

            loop_in_units(K, UNIT, unit, remainder)

        return outlined(types.void(kind, *[types.int64] * 4), f"expand.{encoding}", emit)

    return expand


@njit(error_model="numpy")
def any_bits(scales, step, count, mask):
    """Return the bits of a mask that are set in any scale of a tile.

    The tile has four rows of `count` float32 scales, which lie `step` bytes apart.
    """
    bits = np.int32(0)
    for i in range(COLUMNS):
        for g in range(count):
            bits |= bits_of(get(F, scales + i * step, g))
    return bits & mask


@njit(inline="always")
def scale_row(row, rows_per_scale):
    """Return which row of scales belongs to a row of quantised weights, by number."""
    # Without a branch, the division would take as long as half a row of 4-bit codes.
    return row if rows_per_scale == 1 else row // rows_per_scale


def product(kind, encoding, mask, integers):
    """Make code that multiplies a quantised matrix with an input row, or decodes it.

    Other kernels call the code for some rows of the matrix. Decoded rows are float32. The code
    depends on what FORMATS has for this encoding, and on no other encoding.

    encoding: name in FORMATS
    mask: if none of these bits is set in the scales of some rows, their weights need no rounding to
          the model's type; 0: not checked
    integers: multiply with an input row that was converted to integers; a call for 0 rows converts
          the input row
    """
    form, block_size = FORMATS[encoding], BLOCKS.get(encoding.split(".")[0], (1, kind.itemsize))
    prepare, prepare_times = (
        preparing_code(encoding, form.expander, multiplied) for multiplied in (False, True)
    )
    expand = expanding_code(encoding, form.expander, block_size[0] % UNIT > 0)
    tile = tile_code(encoding, form.expander, block_size)
    pack = powers_at = integer_1 = integer_4 = None
    if integers:
        pack, powers_at = packing_code(encoding, form.integers)
        integer_1, integer_4 = integer_tiles(encoding, form.integers, block_size)

    def enter(pointer):
        p = address_of(pointer)
        layout, K, scratch = word(p, F_LAYOUT), word(p, F_INPUTS), word(p, F_SCRATCH)
        first, rows = word(p, F_FIRST), word(p, F_ROWS)
        block, carry = word(p, F_BLOCK), word(p, F_CARRY)
        x, out = word(p, F_X), word(p, F_OUT)
        if integers:
            if rows == 0:
                pack(x, K, out)
                return
            powers = powers_at(x, K)
        ld, step = word(layout, L_ROW), K // 2 + 64
        codes = word(p, F_SLOT) + word(layout, L_CODES) + first * ld
        scales, scale_stride = word(p, F_SLOT) + word(layout, L_SCALE), word(layout, L_SCALE_ROW)
        share, rows_per_scale = word(layout, L_SHARE), word(layout, L_ROWS)
        others, other_stride = word(p, F_SLOT) + word(layout, L_OTHER), word(layout, L_OTHER_ROW)
        indices, index_stride = word(p, F_SLOT) + word(layout, L_INDEX), word(layout, L_INDEX_ROW)
        rows_per_other, rows_per_index = word(layout, L_OTHER_ROWS), word(layout, L_INDEX_ROWS)
        n = 0
        while n < rows:
            count = COLUMNS if rows - n >= COLUMNS and x != 0 else 1
            w, y = codes + n * ld, out + 4 * n
            ahead = w + COLUMNS * ld if n + COLUMNS < rows else word(p, F_NEXT)
            for i in range(count):
                row, ready = first + n + i, scratch + i * step
                scale = scales + scale_row(row, rows_per_scale) * scale_stride
                other = others + scale_row(row, rows_per_other) * other_stride
                index = indices + scale_row(row, rows_per_index) * index_stride
                if integers and x != 0:
                    prepare_times(w + i * ld, scale, other, index, ready, K, share, powers)
                    continue
                prepare(w + i * ld, scale, other, index, ready, K, share, 0)
            if x == 0:
                expand(kind, w, scratch, K, out + 4 * n * K)
            elif integers:
                if count == 1:
                    integer_1(w, ld, w + ld, scratch, step, K, block, carry, x, y)
                else:
                    integer_4(w, ld, ahead, scratch, step, K, block, carry, x, y)
            elif count == 1:
                weights = scratch + step
                expand(kind, w, scratch, K, weights)
                dot_1x1(F, F, weights, 4 * K, K, block, carry, (x,), (y,))
            elif mask != 0 and any_bits(scratch, step, K // GROUP, np.int32(mask)) == 0:
                tile(F, w, ld, ahead, scratch, step, K, block, carry, x, y)
            else:
                tile(kind, w, ld, ahead, scratch, step, K, block, carry, x, y)
            n += count

    return enter


@njit(inline="always")
def multiply_row(
    product, layout, slot, K, first, rows, block, carry, x, out, scratch, packed, after
):  # fmt: skip
    """Multiply some rows of a quantised matrix with one float32 row.

    Computes out[:rows] = matrix[first:first + rows] @ x [K] in float32, or adds the product to out
    if `carry` is not 0. `product` is the address of the code that multiplies this encoding.
    `scratch` is memory for that code's arguments, for an input row as integers and for 5 K bytes.
    `packed` is the address of the input row whose integers are there (0: none); the new value is
    returned. The codes at the address `after` are prefetched to the CPU cache: they are read next.
    """
    place = (scratch + 8 * FRAME_ARGUMENTS + 63) & -64
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
        enter_at(word(product, PACK), scratch)
    if room != 0:
        put_word(scratch, F_X, place)
    put_word(scratch, F_ROWS, rows)
    put_word(scratch, F_OUT, out)
    put_word(scratch, F_SCRATCH, place + room)
    enter_at(word(product, MULTIPLY), scratch)
    return x if room != 0 else 0


@njit(inline="always")
def expanded_rows(product, layout, slot, K, first, rows, scratch):
    """Decode rows of a quantised matrix to scratch memory, and return their address.

    The rows first to first + rows - 1 become float32 [rows, K]. `product` is the address of the
    code that decodes this encoding. `scratch` is memory for that code's arguments, the decoded
    rows, and 5 K bytes.
    """
    place = (scratch + 8 * FRAME_ARGUMENTS + 63) & -64
    put_word(scratch, F_SLOT, slot)
    put_word(scratch, F_LAYOUT, layout)
    put_word(scratch, F_INPUTS, K)
    put_word(scratch, F_FIRST, first)
    put_word(scratch, F_ROWS, rows)
    put_word(scratch, F_X, 0)
    put_word(scratch, F_OUT, place)
    put_word(scratch, F_SCRATCH, place + 4 * rows * K)
    enter_at(word(product, EXPAND), scratch)
    return place
