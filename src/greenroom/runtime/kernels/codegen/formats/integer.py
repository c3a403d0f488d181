"""Products with encoded matrices by integers: weights are not rounded to the model's type.

A row of x is turned into integers once (packing.py), codes are integers already (codes.py). A
4-bit weight takes a fourth of the instructions that expanding it to float32 takes. Where x is a
number of bfloat16 that is not 64 times smaller than its largest neighbour the sums are those of
exact weights and inputs; others are rounded to 2^-15 of that neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.core.layout import BLOCKS
from greenroom.runtime.kernels.codegen.formats.codes import (
    BLOCK,
    LINE,
    Left,
    whole_of,
    words_from,
)
from greenroom.runtime.kernels.codegen.formats.encoded import (
    F_BLOCK,
    F_CARRY,
    F_FIRST,
    F_INPUTS,
    F_LAYOUT,
    F_NEXT,
    F_OUT,
    F_ROWS,
    F_SCRATCH,
    F_SLOT,
    F_X,
    L_CODES,
    L_ROW,
    L_ROWS,
    L_SCALE,
    L_SCALE_ROW,
    L_SHARE,
    expand,
    prepare,
    prepare_times,
    shared_by,
)
from greenroom.runtime.kernels.codegen.formats.packing import (
    pack,
    powers_at,
)
from greenroom.runtime.kernels.codegen.formats.row import (
    Row,
    Value,
    at_byte,
    constant,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    BEYOND,
    COLUMNS,
    F32,
    I32,
    I64,
    IN_TURN,
    fma,
    lane_sums,
    outlined,
    prefetch,
    vector_of,
)
from greenroom.runtime.kernels.codegen.llvm.ir import address_of, word


def _tile(columns: int) -> Any:
    """`tile(encoding, codes, ld, ahead, ready, step, K, block, carry, x, out)`.

    `columns` rows of weights, as encoded.tile. Their scales lie `step` bytes apart; x is packed.
    `block` is K or 64.
    """

    @intrinsic(prefer_literal=True)
    def tile(typingctx, encoding, codes, ld, ahead, ready, step, K, block, carry, x, out):
        name, whole = whole_of(encoding)

        def emit(b, sig, args):
            inputs, nbytes = BLOCKS[name]
            _Tile(b, whole, columns, whole.unit * nbytes // inputs, args).emit()

        signature = types.void(encoding, *[types.int64] * 10)
        return signature, outlined(f"integer{columns}.{name}", emit)

    return tile


class _Tile:
    """The code of a tile: `columns` rows of codes, of `nbytes` each a turn, with a packed x."""

    def __init__(self, b, whole, columns, nbytes, args):
        self.b, self.whole, self.columns, self.nbytes = b, whole, columns, nbytes
        codes, ld, self.ahead, ready, step, self.K, self.block, carry, self.x, out = args
        short = vector_of(F32, columns)
        self.sums = cgutils.alloca_once_value(b, ir.Constant(short, None))
        self.place = b.inttoptr(out, short.as_pointer())
        with b.if_then(b.icmp_signed("!=", carry, carry.type(0))):
            b.store(b.load(self.place, align=4), self.sums)
        self.rows = []
        for n in range(columns):
            scale = b.add(ready, b.mul(step, I64(n)))
            minima = b.add(scale, b.lshr(self.K, I64(3)))
            self.rows.append(
                Row(b.add(codes, b.mul(ld, I64(n))), None, scale, minima, self.K, None)
            )
        nothing = ir.Constant(vector_of(F32), None)
        self.cells = [cgutils.alloca_once_value(b, nothing) for _ in range(columns)]

    def emit(self):
        b, sums = self.b, self.sums
        short = b.icmp_signed("==", self.block, I64(BLOCK))
        with b.if_else(short) as (short_blocks, one_block):
            with short_blocks:
                self.turns(self.in_blocks)
            with one_block:
                every = range(self.columns)
                alone = IN_TURN and self.whole.alone
                for of in [[n] for n in every] if alone else [every]:
                    self.turns(partial(self.turn, add=self.grow, of=of))
                total = lane_sums(b, [b.load(cell) for cell in self.cells])
                b.store(b.fadd(b.load(sums), total), sums)
        b.store(b.load(sums), self.place, align=4)

    def turns(self, one: Callable[[Value, Left], None]) -> None:
        b, unit = self.b, self.whole.unit
        left = b.and_(self.K, I64(unit - 1))
        whole = b.sub(self.K, left)
        with cgutils.for_range_slice(b, I64(0), whole, I64(unit), I64) as (at, _):
            one(at, None)
        with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
            one(b.sub(self.K, left), left)

    def turn(
        self,
        at: Value,
        left: Left,
        add: Callable[[int, int, Value, Value], None],
        of: Sequence[int],
    ) -> None:
        """A turn of some rows; those behind them are asked for where there are several."""
        b, whole, nbytes = self.b, self.whole, self.columns * self.nbytes
        number = b.udiv(at, I64(whole.unit))
        here = b.add(self.x, b.mul(number, I64(LINE * whole.vectors)))
        vectors = [words_from(b, at_byte(b, here, LINE * i), 16) for i in range(whole.vectors)]
        # In the order in which they lie: the processor's own prefetching joins in.
        behind = b.add(self.ahead, b.mul(number, I64(nbytes)))
        for line in range(0, nbytes if len(of) == self.columns else 0, LINE):
            prefetch(b, at_byte(b, behind, line))
            if BEYOND:
                prefetch(b, at_byte(b, behind, line + BEYOND), cache=2)
        for n in of:
            for block, value, factor in whole.terms(b, self.rows[n], at, vectors, left):
                add(n, block, value, factor)

    def grow(self, n: int, block: int, value: Value, factor: Value) -> None:
        self.b.store(fma(self.b, value, factor, self.b.load(self.cells[n])), self.cells[n])

    def in_blocks(self, at: Value, left: Left) -> None:
        b, found = self.b, dict[tuple[int, int], Value]()
        columns, width = range(self.columns), 2 if self.whole.paired else 1

        def add(n: int, block: int, value: Value, factor: Value) -> None:
            old = found.get((block, n))
            found[block, n] = b.fmul(value, factor) if old is None else fma(b, value, factor, old)

        self.turn(at, left, add, columns)
        for block in sorted({block for block, _ in found}):
            total = lane_sums(b, [found[block, n] for n in columns], width)
            for i in range(width):
                part = [i + n * width for n in columns]
                value = b.shuffle_vector(total, total, constant(part, I32))
                b.store(b.fadd(b.load(self.sums), value), self.sums)


tile_1, tile_4 = _tile(1), _tile(COLUMNS)


def product(kind, encoding):
    """As `encoded.product`, by integers: x is packed; no rows: pack x into `out`."""

    def enter(pointer):
        p = address_of(pointer)
        layout, K, scratch = word(p, F_LAYOUT), word(p, F_INPUTS), word(p, F_SCRATCH)
        first, rows = word(p, F_FIRST), word(p, F_ROWS)
        block, carry = word(p, F_BLOCK), word(p, F_CARRY)
        x, out = word(p, F_X), word(p, F_OUT)
        if rows == 0:
            pack(encoding, x, K, out)
            return
        ld, step = word(layout, L_ROW), K // 4 + 64
        codes = word(p, F_SLOT) + word(layout, L_CODES) + first * ld
        scales, apart = word(p, F_SLOT) + word(layout, L_SCALE), word(layout, L_SCALE_ROW)
        share, together = word(layout, L_SHARE), word(layout, L_ROWS)
        powers, after = powers_at(encoding, x, K), word(p, F_NEXT)
        n = 0
        while n < rows:
            count = COLUMNS if rows - n >= COLUMNS and x != 0 else 1
            w, y = codes + n * ld, out + 4 * n
            ahead = w + COLUMNS * ld if n + COLUMNS < rows else after
            for i in range(count):
                scale = scales + shared_by(first + n + i, together) * apart
                if x == 0:
                    prepare(encoding, w, scale, scratch, K, share, 0)
                else:
                    prepare_times(encoding, w + i * ld, scale, scratch + i * step, K, share, powers)
            if x == 0:
                expand(encoding, kind, w, scratch, K, out + 4 * n * K)
            elif count == 1:
                tile_1(encoding, w, ld, w + ld, scratch, step, K, block, carry, x, y)
            else:
                tile_4(encoding, w, ld, ahead, scratch, step, K, block, carry, x, y)
            n += count

    return enter
