"""Products with encoded matrices: `product` multiplies rows of weights that it expands itself.

A lane of a vector sums what it sums in `dot` of ir.py, in the same order: the result has the bits
of the same weights expanded to the model's type beforehand.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.core.layout import BLOCKS
from greenroom.runtime.kernels.codegen.formats.expand import (
    EXPANDERS,
    NAMES,
)
from greenroom.runtime.kernels.codegen.formats.row import (
    GROUP,
    VECTORS,
    Row,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    COLUMNS,
    F32,
    I32,
    I64,
    LANES,
    SIZE,
    fma,
    lane_sums,
    load,
    outlined,
    prefetch,
    store,
    vector_of,
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

F = np.float32(0)
UNIT = 2 * GROUP  # inputs of a turn of the loop

# The words of `product`: addresses of a slot, of the layout's words, of one row of x [K] (0: the
# weights are written to `out`), of `out` and of memory that it may use: 5 K bytes; of codes that
# are wanted after the last row's.
FRAME_WORDS = 16
(
    F_SLOT, F_LAYOUT, F_INPUTS, F_FIRST, F_ROWS, F_BLOCK, F_CARRY, F_X, F_OUT, F_SCRATCH, F_NEXT,
) = range(11)  # fmt: skip

# The words of a matrix's layout: bytes from the slot's start to the codes, and from row to row; the
# same of the scales; groups of 32 inputs that share a scale, and rows that do; bytes that a row of
# x takes where the product wants it packed (see integer.py), else 0.
LAYOUT_WORDS = 7
L_CODES, L_ROW, L_SCALE, L_SCALE_ROW, L_SHARE, L_ROWS, L_PACKED = range(LAYOUT_WORDS)


def _named(encoding):
    name = NAMES[encoding.literal_value]
    return name, EXPANDERS[name]


def _permuted(b, vector, order):
    """Lane i takes what lane order[i] has."""
    if order == tuple(range(LANES)):
        return vector
    return b.shuffle_vector(vector, vector, ir.Constant(vector_of(I32), list(order)))


def _inverse(order):
    return tuple(order.index(i) for i in range(LANES))


def _of(codes, ready, inputs, scale=None, share=None, powers=None):
    """A row whose minima, if it has any, follow its scales: room for one for 16 inputs in all."""
    return lambda b: Row(
        codes, scale, ready, b.add(ready, b.lshr(inputs, I64(3))), inputs, share, powers
    )


def _prepare(multiplied):
    """`prepare(encoding, codes, scale, ready, inputs, share, powers)`: write a row's scales.

    They are float32, `inputs / 4` bytes at most, and are multiplied by `powers` or as they are.
    """

    @intrinsic(prefer_literal=True)
    def prepare(typingctx, encoding, codes, scale, ready, inputs, share, powers):
        name, expander = _named(encoding)

        def emit(b, sig, args):
            codes, scale, ready, inputs, share, powers = args
            row = _of(codes, ready, inputs, scale, share, powers if multiplied else None)
            expander.prepare(b, row(b))

        signature = types.void(encoding, *[types.int64] * 6)
        return signature, outlined(f"prepare{'_times' * multiplied}.{name}", emit)

    return prepare


prepare, prepare_times = _prepare(False), _prepare(True)


@intrinsic(prefer_literal=True)
def expand(typingctx, encoding, kind, codes, ready, K, out):
    """Write a row's K weights as float32; its scales are ready."""
    name, expander = _named(encoding)
    kind = types.unliteral(kind)

    def emit(b, sig, args):
        codes, ready, K, out = args
        row, back = _of(codes, ready, K)(b), _inverse(expander.order)

        def unit(at, halves):
            for half in range(halves):
                for i, weights in enumerate(expander.group(b, kind, row, at, half)):
                    place = b.add(b.shl(at, I64(2)), I64(4 * (GROUP * half + LANES * i)))
                    store(b, _permuted(b, weights, back), b.add(out, place))

        _units(b, K, unit)

    signature = types.void(encoding, kind, *[types.int64] * 4)
    return signature, outlined(f"expand.{name}", emit)


def _units(b, K, unit):
    """unit(at, halves): for every 64 inputs, and for the 32 that may be left."""
    left = b.and_(K, I64(UNIT - 1))
    with cgutils.for_range_slice(b, I64(0), b.sub(K, left), I64(UNIT), I64) as (at, _):
        unit(at, 2)
    with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
        unit(b.sub(K, left), 1)


@intrinsic(prefer_literal=True)
def tile(typingctx, encoding, kind, codes, ld, ahead, ready, K, block, carry, x, out):
    """out[:COLUMNS] (+)= the products of COLUMNS rows of weights with x, as `dot_1x4` sums them.

    `block` is K, or 64. The cache lines of as many rows at `ahead` are asked for.
    """
    name, expander = _named(encoding)
    kind = types.unliteral(kind)
    inputs, nbytes = BLOCKS.get(name.split(".")[0], (1, SIZE[kind]))

    def emit(b, sig, args):
        _Tile(b, kind, expander, UNIT * COLUMNS * nbytes // inputs, args).emit()

    signature = types.void(encoding, kind, *[types.int64] * 9)
    return signature, outlined(f"tile.{name}", emit)


class _Tile:
    """The code of a `tile`; `turn` is the bytes of all rows' 64 inputs."""

    def __init__(self, b, kind, expander, turn, args):
        self.b, self.kind, self.expander, self.turn = b, kind, expander, turn
        codes, ld, self.ahead, ready, self.K, self.block, self.carry, self.x, self.out = args
        self.short, self.back = vector_of(F32, COLUMNS), _inverse(expander.order)
        self.sums = cgutils.alloca_once_value(b, ir.Constant(self.short, [0.0] * COLUMNS))
        self.cells = [cgutils.alloca_once(b, vector_of(F32)) for _ in range(COLUMNS)]
        self.lines = codes, ld, ready

    def emit(self):
        b = self.b
        place = b.inttoptr(self.out, self.short.as_pointer())
        with b.if_then(b.icmp_signed("!=", self.carry, self.carry.type(0))):
            b.store(b.load(place, align=4), self.sums)
        (codes, ld, ready), step = self.lines, b.lshr(self.K, I64(2))
        self.rows = []
        for n in range(COLUMNS):
            mine = b.add(codes, b.mul(ld, I64(n)))
            self.rows.append(_of(mine, b.add(ready, b.mul(step, I64(n))), self.K)(b))
        # Blocks of one unit have code without a loop of their own: it overlaps from block to block.
        one_unit = b.icmp_signed("==", self.block, I64(UNIT))
        with b.if_else(one_unit) as (short_blocks, one_block):
            with short_blocks:
                _units(b, self.K, lambda at, halves: self.summed(lambda: self.unit(at, halves)))
            with one_block:
                self.summed(lambda: _units(b, self.K, self.unit))
        b.store(b.load(self.sums), place, align=4)

    def unit(self, at, halves):
        b = self.b
        # In the order in which they lie: the processor's own prefetching joins in.
        behind = b.add(self.ahead, b.mul(b.lshr(at, I64(6)), I64(self.turn)))
        for line in range(0, self.turn, 64):
            prefetch(b, b.add(behind, I64(line)))
        for half in range(halves):
            self.group(at, half)

    def group(self, at, half):
        b, expander = self.b, self.expander
        first = b.add(self.x, b.add(b.shl(at, I64(2)), I64(4 * GROUP * half)))
        xs = []
        for i in range(VECTORS):
            xv = load(b, types.float32, b.add(first, I64(4 * LANES * i)))
            xs.append(_permuted(b, xv, expander.order))
        for row, cell in zip(self.rows, self.cells, strict=True):
            for xv, weights in zip(xs, expander.group(b, self.kind, row, at, half), strict=True):
                b.store(fma(b, xv, weights, b.load(cell)), cell)

    def summed(self, products):
        """Add what `products()` multiplies to the sums, as a block of its own."""
        b, zero = self.b, ir.Constant(vector_of(F32), [0.0] * LANES)
        for cell in self.cells:
            b.store(zero, cell)
        products()
        total = lane_sums(b, [_permuted(b, b.load(cell), self.back) for cell in self.cells])
        b.store(b.fadd(b.load(self.sums), total), self.sums)


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


def product(kind, encoding, mask):
    """Rows first..first + rows of a matrix times x [K], or the rows expanded: float32 [rows, K].

    `encoding` is a number of `NAMES`. Where no scale has a bit of `mask` (0: not looked at), its
    products with codes are numbers of the model's type already, and are not rounded.

    A body that a wave calls; its one argument is described above.
    """

    def enter(pointer):
        p = address_of(pointer)
        layout, K, scratch = word(p, F_LAYOUT), word(p, F_INPUTS), word(p, F_SCRATCH)
        first, rows = word(p, F_FIRST), word(p, F_ROWS)
        block, carry = word(p, F_BLOCK), word(p, F_CARRY)
        x, out = word(p, F_X), word(p, F_OUT)
        ld, step, after = word(layout, L_ROW), K // 4, word(p, F_NEXT)
        codes = word(p, F_SLOT) + word(layout, L_CODES) + first * ld
        scales, apart = word(p, F_SLOT) + word(layout, L_SCALE), word(layout, L_SCALE_ROW)
        share, together = word(layout, L_SHARE), word(layout, L_ROWS)
        whole = rows - rows % COLUMNS if x != 0 else 0
        for n in range(0, whole, COLUMNS):
            for i in range(COLUMNS):
                scale = scales + shared_by(first + n + i, together) * apart
                prepare(encoding, codes + (n + i) * ld, scale, scratch + i * step, K, share, 0)
            w, y = codes + n * ld, out + 4 * n
            ahead = w + COLUMNS * ld if n + COLUMNS < whole else after
            if mask != 0 and any_bits(scratch, step, K // GROUP, np.int32(mask)) == 0:
                tile(encoding, F, w, ld, ahead, scratch, K, block, carry, x, y)
            else:
                tile(encoding, kind, w, ld, ahead, scratch, K, block, carry, x, y)
        for n in range(whole, rows):
            scale = scales + shared_by(first + n, together) * apart
            prepare(encoding, codes + n * ld, scale, scratch, K, share, 0)
            if x == 0:
                expand(encoding, kind, codes + n * ld, scratch, K, out + 4 * n * K)
            else:
                weights = scratch + K
                expand(encoding, kind, codes + n * ld, scratch, K, weights)
                dot_1x1(F, F, weights, 4 * K, K, block, carry, (x,), (out + 4 * n,))

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
