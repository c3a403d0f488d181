"""A tile: products of some rows of encoded weights with one row of x, whatever the encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic

from greenroom.core.layout import BLOCKS
from greenroom.runtime.kernels.codegen.formats.codes import (
    BLOCK,
    LINE,
    Left,
    Term,
    Whole,
    whole_of,
)
from greenroom.runtime.kernels.codegen.formats.expand import (
    EXPANDERS,
    GROUP,
    NAMES,
    STARTS,
    Expander,
)
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import BEYOND, COLUMNS, IN_TURN, LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    I32,
    NATURAL,
    SIZE,
    Value,
    Variable,
    in_turns,
    lane_sums,
    outlined,
)

UNIT = 2 * GROUP  # inputs of a turn of the loop, where weights are expanded
Part = Callable[[Row], list[Term]]  # what a row's sums grow by


@dataclass(frozen=True, slots=True)
class Turn:
    """How a turn of `unit` inputs is multiplied.

    parts:   (x, at, left) -> the turn's parts, each done for all rows before the next
    order:   which sum stands in each lane
    paired:  do the halves of a vector belong to two blocks?
    alone:   are rows read one after the other?
    beyond:  bytes beyond the next rows that are asked for too
    """

    unit: int
    parts: Callable[[Value, Value, Left], Iterator[Part]]
    order: tuple[int, ...] = NATURAL
    paired: bool = False
    alone: bool = False
    beyond: int = 0


def named(encoding: Any) -> tuple[str, Expander]:
    name = NAMES[encoding.literal_value]
    return name, EXPANDERS[name]


def inverse(order: Sequence[int]) -> list[int]:
    """The places of lanes that stand in an order."""
    return [order.index(i) for i in range(LANES)]


def _expanded(kind: Any, expander: Expander, x: Value, at: Value, left: Left) -> Iterator[Part]:
    """Parts of 32 inputs."""
    for half in range(2 if left is None else 1):
        first = x + ((at << 2) + 4 * GROUP * half)
        xs = [(first + 4 * start).load(F32, LANES).pick(expander.order) for start in STARTS]

        def part(row: Row, half: int = half, xs: list[Value] = xs) -> list[Term]:
            weights = expander.group(kind, row, at, half)
            return [(0, *pair) for pair in zip(xs, weights, strict=True)]

        yield part


def _whole(whole: Whole, x: Value, at: Value, left: Left) -> Iterator[Part]:
    """One part, of packed x."""
    here = x + at / whole.unit * (LINE * whole.vectors)
    vectors = [(here + LINE * i).load(I32, 16) for i in range(whole.vectors)]
    yield lambda row: whole.terms(row, at, vectors, left)


@intrinsic(prefer_literal=True)
def tile(typingctx, encoding, kind, codes, ld, ahead, ready, step, K, block, carry, x, out):
    """out[:COLUMNS] (+)= the products of COLUMNS rows of weights with x, as `dot_1x4` sums them.

    `block` is K, or 64. The rows' scales lie `step` bytes apart. The cache lines of as many rows at
    `ahead` are asked for.
    """
    name, expander = named(encoding)
    kind = types.unliteral(kind)
    inputs, nbytes = BLOCKS.get(name.split(".")[0], (1, SIZE[kind]))
    turn = Turn(UNIT, partial(_expanded, kind, expander), inverse(expander.order))

    def emit(*args):
        _Tile(turn, COLUMNS, UNIT * nbytes // inputs, *args).emit()

    return outlined(types.void(encoding, kind, *[types.int64] * 10), f"tile.{name}", emit)


def _integers(columns):
    @intrinsic(prefer_literal=True)
    def tile(typingctx, encoding, codes, ld, ahead, ready, step, K, block, carry, x, out):
        """`tile` of `columns` rows by integers; x is packed."""
        name, whole = whole_of(encoding)
        inputs, nbytes = BLOCKS[name]
        parts, alone = partial(_whole, whole), IN_TURN and whole.alone
        turn = Turn(whole.unit, parts, NATURAL, whole.paired, alone, BEYOND)

        def emit(*args):
            _Tile(turn, columns, whole.unit * nbytes // inputs, *args).emit()

        signature = types.void(encoding, *[types.int64] * 10)
        return outlined(signature, f"integer{columns}.{name}", emit)

    return tile


integer_1, integer_4 = _integers(1), _integers(COLUMNS)


class _Tile:
    """The code of a tile: `columns` rows of codes, of `nbytes` each a turn."""

    def __init__(
        self, turn, columns, nbytes, codes, ld, ahead, ready, step, K, block, carry, x, out
    ):  # fmt: skip
        self.turn, self.columns, self.nbytes = turn, range(columns), columns * nbytes
        self.ahead, self.K, self.block, self.carry = ahead, K, block, carry
        self.x, self.out = x, out
        self.rows = [Row(codes + ld * n, ready + step * n, K) for n in self.columns]
        self.sums = Variable(x.constant([0.0] * columns, F32))
        self.cells = [Variable(x.constant([0.0] * LANES, F32)) for _ in self.columns]

    def emit(self):
        b, sums, one_turn = self.x.b, self.sums, partial(in_turns, self.K, self.turn.unit)
        with b.if_then((self.carry > 0).ir):
            sums.now = self.out.load(F32, len(self.columns))
        # Blocks of one unit have code without a loop of their own: it overlaps from block to block.
        with b.if_else(self.block.equals(BLOCK).ir) as (short_blocks, one_block):
            with short_blocks:
                one_turn(self.in_blocks)
            with one_block:
                for of in [[n] for n in self.columns] if self.turn.alone else [self.columns]:
                    one_turn(partial(self.products, add=self.grow, of=of))
                sums.now += self.total([cell.now for cell in self.cells])
        self.out.store(sums.now)

    def products(self, at, left, add, of):
        """A turn of some rows; those behind them are asked for where there are several."""
        # In the order in which they lie: the processor's own prefetching joins in.
        behind = self.ahead + at / self.turn.unit * self.nbytes
        for line in range(0, self.nbytes if len(of) == len(self.columns) else 0, LINE):
            (behind + line).prefetch()
            if self.turn.beyond:
                (behind + (line + self.turn.beyond)).prefetch(cache=2)
        for part in self.turn.parts(self.x, at, left):
            for n in of:
                for block, value, factor in part(self.rows[n]):
                    add(n, block, value, factor)

    def grow(self, n, block, value, factor):
        cell = self.cells[n]
        cell.now = value.fma(factor, cell.now)

    def in_blocks(self, at, left):
        found = {}

        def add(n, block, value, factor):
            old = found.get((block, n))
            found[block, n] = value * factor if old is None else value.fma(factor, old)

        self.products(at, left, add, self.columns)
        width = 2 if self.turn.paired else 1
        for block in sorted({block for block, _ in found}):
            total = self.total([found[block, n] for n in self.columns], width)
            for i in range(width):
                self.sums.now += total.pick([i + n * width for n in self.columns])

    def total(self, vectors, groups=1):
        return lane_sums([vector.pick(self.turn.order) for vector in vectors], groups)
