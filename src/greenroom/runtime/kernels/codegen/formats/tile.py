"""LLVM code that multiplies a few rows of quantised weights with one input row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.formats.codes import (
    BLOCK,
    LINE,
    IntegerProduct,
    Left,
    Term,
)
from greenroom.runtime.kernels.codegen.formats.expand import GROUP, STARTS, Expander
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.intrinsics import outlined
from greenroom.runtime.kernels.codegen.llvm.target import BEYOND, COLUMNS, LANES, ROW_BY_ROW
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    I32,
    NATURAL,
    Value,
    Variable,
    lane_sums,
    loop_in_units,
)

UNIT = 2 * GROUP  # inputs of an iteration where weights are expanded
Part = Callable[[Row], list[Term]]  # terms to add to a row's sums


@dataclass(frozen=True, slots=True)
class Iteration:
    """LLVM code of one loop iteration of a product with quantised weights.

    unit:       number of inputs of an iteration
    parts:      function of (x, index of the first input, number of inputs left; None: a complete
                iteration) that yields functions of a row; each returns terms to add to the row's
                sums, and is called for all rows before the next
    order:      the lanes of a vector of sums, in the order of the inputs
    paired:     do the halves of a vector belong to two blocks of 64 inputs?
    row_by_row: are rows read one after the other?
    beyond:     bytes beyond the next rows at which a second prefetch begins; 0: none
    remainder:  may a row end within an iteration?
    """

    unit: int
    parts: Callable[[Value, Value, Left], Iterator[Part]]
    order: tuple[int, ...] = NATURAL
    paired: bool = False
    row_by_row: bool = False
    beyond: int = 0
    remainder: bool = True


def inverse(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation of vector lanes."""
    return [order.index(i) for i in range(LANES)]


def _expanded_parts(
    kind: Any, expander: Expander, x: Value, at: Value, left: Left
) -> Iterator[Part]:
    """Yield parts of 32 inputs, whose weights are decoded."""
    for half in range(2 if left is None else 1):
        first = x + ((at << 2) + 4 * GROUP * half)
        xs = [(first + 4 * start).load(F32, LANES).shuffle(expander.order) for start in STARTS]

        def part(row: Row, half: int = half, xs: list[Value] = xs) -> list[Term]:
            weights = expander.group(kind, row, at, half)
            return [(0, *pair) for pair in zip(xs, weights, strict=True)]

        yield part


def _integer_parts(form: IntegerProduct, x: Value, at: Value, left: Left) -> Iterator[Part]:
    """Yield the one part of an integer product; x is packed."""
    packed = x + at / form.unit * (LINE * form.vectors)
    vectors = [(packed + LINE * i).load(I32, 16) for i in range(form.vectors)]
    yield lambda row: form.terms(row, at, vectors, left)


def tile_code(encoding: str, expander: Expander, block_size: tuple[int, int]) -> Any:
    """Make the intrinsic that multiplies a tile of quantised rows with one input row.

    The code decodes weights in registers. It writes the products of four rows of weights with x [K]
    to out[:4], or adds them if `carry` is not 0. The sums are those of `dot_1x4`, taken in blocks
    of `block` inputs: K or 64. The rows' scales are `step` bytes apart. Four more rows, at the
    address `ahead`, are prefetched to the CPU cache.

    block_size: (inputs, bytes) of a block of the encoding
    """
    inputs, nbytes = block_size

    @intrinsic
    def tile(typingctx, kind, codes, ld, ahead, ready, step, K, block, carry, x, out):
        parts = partial(_expanded_parts, kind, expander)
        iteration = Iteration(UNIT, parts, inverse(expander.order), remainder=inputs % UNIT > 0)

        def emit(*args):
            _Tile(iteration, COLUMNS, COLUMNS * UNIT * nbytes // inputs, *args).emit()

        return outlined(types.void(kind, *[types.int64] * 10), f"tile.{encoding}", emit)

    return tile


def integer_tiles(encoding: str, form: IntegerProduct, block_size: tuple[int, int]) -> Any:
    """Make the intrinsics that multiply one row, or four rows, with a packed row.

    Their parameters are those of the `tile` that decodes in registers, without `kind`.
    """
    inputs, nbytes = block_size

    def of(columns: int) -> Any:
        @intrinsic
        def tile(typingctx, codes, ld, ahead, ready, step, K, block, carry, x, out):
            parts, row_by_row = partial(_integer_parts, form), ROW_BY_ROW and form.row_by_row
            iteration = Iteration(
                form.unit, parts, NATURAL, form.paired, row_by_row, BEYOND, inputs % form.unit > 0
            )

            def emit(*args):
                _Tile(iteration, columns, columns * form.unit * nbytes // inputs, *args).emit()

            signature = types.void(*[types.int64] * 10)
            return outlined(signature, f"integer{columns}.{encoding}", emit)

        return tile

    return of(1), of(COLUMNS)


class _Tile:
    """Emits a tile: `columns` rows of codes, `nbytes` of all of them in an iteration."""

    def __init__(
        self, iteration, columns, nbytes, codes, ld, ahead, ready, step, K, block, carry, x, out
    ):  # fmt: skip
        self.iteration, self.columns, self.nbytes = iteration, range(columns), nbytes
        self.ahead, self.K, self.block, self.carry = ahead, K, block, carry
        self.x, self.out = x, out
        self.rows = [Row(codes + ld * n, ready + step * n, K) for n in self.columns]
        self.sums = Variable(x.constant([0.0] * columns, F32))
        self.cells = [Variable(x.constant([0.0] * LANES, F32)) for _ in self.columns]

    def emit(self):
        b, sums = self.x.b, self.sums
        loop = partial(
            loop_in_units, self.K, self.iteration.unit, remainder=self.iteration.remainder
        )
        with b.if_then((self.carry > 0).ir):
            sums.value = self.out.load(F32, len(self.columns))
        # Blocks of one unit have no inner loop, so that consecutive blocks overlap.
        with b.if_else(self.block.equals(BLOCK).ir) as (short_blocks, one_block):
            with short_blocks:
                loop(self.in_blocks)
            with one_block:
                for of in (
                    [[n] for n in self.columns] if self.iteration.row_by_row else [self.columns]
                ):
                    loop(partial(self.products, add=self.grow, of=of))
                sums.value += self.total([cell.value for cell in self.cells])
        self.out.store(sums.value)

    def products(self, at, left, add, of):
        """Emit one loop iteration of a tile's product, with a prefetch of the next rows.

        Only an iteration over all rows of the tile prefetches.
        """
        # In address order, so that the hardware prefetcher joins in.
        ahead = self.ahead + at / self.iteration.unit * self.nbytes
        for line in range(0, self.nbytes if len(of) == len(self.columns) else 0, LINE):
            (ahead + line).prefetch()
            if self.iteration.beyond:
                (ahead + (line + self.iteration.beyond)).prefetch(cache=2)
        for part in self.iteration.parts(self.x, at, left):
            for n in of:
                for block, value, factor in part(self.rows[n]):
                    add(n, block, value, factor)

    def grow(self, n, block, value, factor):
        cell = self.cells[n]
        cell.value = value.fma(factor, cell.value)

    def in_blocks(self, at, left):
        sums_of = {}

        def add(n, block, value, factor):
            old = sums_of.get((block, n))
            sums_of[block, n] = value * factor if old is None else value.fma(factor, old)

        self.products(at, left, add, self.columns)
        width = 2 if self.iteration.paired else 1
        for block in sorted({block for block, _ in sums_of}):
            total = self.total([sums_of[block, n] for n in self.columns], width)
            for i in range(width):
                self.sums.value += total.shuffle([i + n * width for n in self.columns])

    def total(self, vectors, groups=1):
        return lane_sums([vector.shuffle(self.iteration.order) for vector in vectors], groups)
