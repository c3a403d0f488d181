"""Numba intrinsics for vector code, which Numba's own front end cannot express.

The code uses LLVM vectors of `LANES` floats, so that sums have one fixed order on a given machine:
a dot product is summed lane by lane, the lanes by halving, and the blocks of `block` elements one
after another. An element of the result depends on its own row and column only, never on the tile
that it was computed in, on its neighbours or on the threads.

A witness value stands for a weight type: `np.uint16(0)` bfloat16, `np.int16(0)` float16,
`np.float32(0)` float32. Addresses are plain int64.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.llvm.intrinsics import inline, outlined
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS, LANES, ROW_BY_ROW, ROWS, STRIP
from greenroom.runtime.kernels.codegen.llvm.values import (
    ELEMENT,
    F32,
    F32_KIND,
    I8,
    I32,
    I64,
    SIZE,
    Value,
    Variable,
    counted_loop,
    lane_sums,
)

_INT, _FLOAT = types.int64, types.float32


def _ends(rows):
    return [types.UniTuple(_INT, rows)] * 2


def _dot(rows, columns):
    """`dot(kind, xkind, w, ld, K, block, carry, x, out)`: a tile of x @ w.T.

    `w` is the address of the first of `columns` weight rows of K elements, `ld` bytes apart;
    each of the `rows` addresses x is a row of K elements of xkind; each of the addresses in out
    takes `columns` floats, which are added to where `carry` is set.

    Rows of weights are read side by side, or one after another where ROW_BY_ROW is set, x has one
    row and K is one block. The sums are the same.
    """

    @intrinsic
    def dot(typingctx, kind, xkind, w, ld, K, block, carry, x, out):
        def emit(*args):
            _Dot(kind, xkind, rows, columns, args).emit()

        signature = types.void(kind, xkind, *[_INT] * 5, *_ends(rows))
        return outlined(signature, f"dot{rows}x{columns}", emit)

    return dot


class _Dot:
    """Emits the code of a `dot`."""

    def __init__(self, kind, xkind, rows, columns, args):
        self.kind, self.xkind, self.rows, self.columns = kind, xkind, rows, columns
        self.w, self.ld, self.K, self.block, self.carry, *ends = args
        self.xs, self.outs = ends[:rows], ends[rows:]
        self.row_by_row = ROW_BY_ROW and rows == 1 and columns > 1
        self.zero = self.w.constant([0.0] * LANES, F32)
        self.sums = Variable(self.w.constant([0.0] * (rows * columns), F32))
        self.cells = [Variable(self.zero) for _ in range(rows * columns)]

    def emit(self):
        """Emit code that computes the sums and stores them."""
        columns, sums = self.columns, self.sums
        with self.w.b.if_then((self.carry > 0).ir):
            value = sums.value
            for m, out in enumerate(self.outs):
                for n in range(columns):
                    value = value.with_lane(m * columns + n, (out + 4 * n).load(F32))
            sums.value = value
        with counted_loop(0, self.K, self.block) as start:
            self.one_block(start)
        for m, out in enumerate(self.outs):
            out.store(sums.value.shuffle(range(m * columns, (m + 1) * columns)))

    def one_block(self, start):
        """Emit code that adds products of a block of elements to the sums.

        The block has `block` elements, from element `start` on.
        """
        b, every = self.w.b, range(self.columns)
        for cell in self.cells:
            cell.value = self.zero
        stop = (start + self.block).at_most(self.K)
        left = (stop - start) & (LANES - 1)
        end = stop - left
        if self.row_by_row:
            with b.if_else((self.block >= self.K).ir) as (one_block, blocks):
                with one_block:
                    for n in every:
                        self.steps(start, end, [n])
                with blocks:
                    self.steps(start, end, every)
        else:
            self.steps(start, end, every)
        with b.if_then((left > 0).ir, likely=False):
            self.step(end, every, left.below())
        self.sums.value += lane_sums([cell.value for cell in self.cells])

    def steps(self, start, stop, of):
        """Emit a loop over LANES elements at a time."""
        with counted_loop(start, stop, LANES) as at:
            self.step(at, of)

    def step(self, at, of, mask=None):
        """Emit code that multiplies LANES elements of some rows of weights with x.

        The elements begin at index `at`.
        """
        wat = self.w + at * SIZE[self.kind]
        xs = [(x + at * SIZE[self.xkind]).weights(self.xkind, mask) for x in self.xs]
        if self.rows == 1 and len(of) > 1 and mask is None:
            self.prefetch_rows(wat, at)
        for n in of:
            weights = (wat + self.ld * n).weights(self.kind, mask)
            for m, x in enumerate(xs):
                cell = self.cells[m * self.columns + n]
                cell.value = x.fma(weights, cell.value)

    def prefetch_rows(self, wat, at):
        """Emit code that prefetches the next rows of weights."""
        if not self.row_by_row:
            for n in range(self.columns):
                (wat + self.ld * (n + self.columns)).prefetch()
            return
        turn = SIZE[self.kind] * self.columns
        behind = self.w + self.ld * self.columns + at * turn
        for line in range(0, turn * LANES, 64):
            (behind + line).prefetch()


def _axpy(rows, vectors):
    """`axpy(kind, w, ld, K, block, carry, count, x, out)`: a tile of x @ w, w transposed.

    `w` is the address of K weight rows, `ld` bytes apart, of which `vectors * LANES` columns are
    used, or `count` where there is one vector. x and out as in `dot`, with x in float32.
    """

    @intrinsic
    def axpy(typingctx, kind, w, ld, K, block, carry, count, x, out):
        def emit(w, ld, K, block, carry, count, *ends):
            xs, outs = ends[:rows], ends[rows:]
            mask = count.below() if vectors == 1 else None
            zero, size = w.constant([0.0] * LANES, F32), SIZE[kind] * LANES
            cells = [[Variable(zero) for _ in range(vectors)] for _ in range(rows)]
            fresh = carry.equals(0)
            with counted_loop(0, K, block) as start:
                for row in cells:
                    for cell in row:
                        cell.value = zero
                with counted_loop(start, (start + block).at_most(K)) as at:
                    wat = w + at * ld
                    weights = [(wat + size * n).weights(kind, mask) for n in range(vectors)]
                    for x, row in zip(xs, cells, strict=True):
                        wide = (x + at * 4).load(F32).broadcast()
                        for cell, weight in zip(row, weights, strict=True):
                            cell.value = wide.fma(weight, cell.value)
                first = fresh & start.equals(0)
                for out, row in zip(outs, cells, strict=True):
                    for n, cell in enumerate(row):
                        place = out + 4 * LANES * n
                        before = zero.where(first, place.weights(F32_KIND, mask))
                        place.store(before + cell.value, mask)

        signature = types.void(kind, *[_INT] * 6, *_ends(rows))
        return outlined(signature, f"axpy{rows}x{vectors}", emit)

    return axpy


def _panel(depth):
    """`panel(kind, w, ld, N, x, out)`: out[:N] += x[:depth] @ w[:depth, :N], w transposed.

    Reads `depth` rows of the matrix side by side. N is a multiple of LANES; x and out float32.
    """

    @intrinsic
    def panel(typingctx, kind, w, ld, N, x, out):
        def emit(w, ld, N, x, out):
            rows = [w + ld * k for k in range(depth)]
            xs = [(x + 4 * k).load(F32).broadcast() for k in range(depth)]
            with counted_loop(0, N, LANES) as at:
                place, offset = out + at * 4, at * SIZE[kind]
                value = place.load(F32, LANES)
                for one, row in zip(xs, rows, strict=True):
                    source = row + offset
                    (source + ld * depth).prefetch()
                    value = one.fma(source.weights(kind), value)
                place.store(value)

        return outlined(types.void(kind, *[_INT] * 5), f"panel{depth}", emit)

    return panel


panel_1, panel_8 = _panel(1), _panel(8)
dot_1x1, dot_1x4, dot_many = _dot(1, 1), _dot(1, COLUMNS), _dot(ROWS, COLUMNS)
axpy_1x1, axpy_many = _axpy(1, 1), _axpy(ROWS, STRIP)


def _element(address, index, element):
    """Return a pointer to an element of a row, by index, so that LLVM vectorises loops over it."""
    return address.b.gep(address.pointer(element), [index.ir])


@intrinsic
def get(typingctx, kind, address, index):
    """Load element `index` of a row of a weight type, converted to float32."""

    def emit(_, address, index):
        place = _element(address, index, ELEMENT[kind])
        return Value(address.b, address.b.load(place, align=SIZE[kind])).widened(kind)

    return inline(_FLOAT(kind, _INT, _INT), emit)


@intrinsic
def put(typingctx, kind, address, index, value):
    """Round a float32 value to a weight type, and store it in a row."""

    def emit(_, address, index, value):
        place = _element(address, index, ELEMENT[kind])
        address.b.store(value.narrowed(kind).ir, place, align=SIZE[kind])

    return inline(types.void(kind, _INT, _INT, _FLOAT), emit)


@intrinsic
def rounded(typingctx, kind, value):
    """Round a float32 value to a weight type, `kind`; it stays float32."""
    return inline(_FLOAT(kind, _FLOAT), lambda _, value: value.rounded(kind))


@intrinsic
def bits_of(typingctx, value):
    """Return the bits of a float32 value as int32."""
    return inline(types.int32(_FLOAT), lambda value: value.bitcast(I32))


@intrinsic
def float_of(typingctx, bits):
    """Return the float32 value that has the bits of an int32."""
    return inline(_FLOAT(types.int32), lambda bits: bits.bitcast(F32))


@intrinsic
def word(typingctx, address, index):
    """Load the int64 with number `index` of an array at an address."""

    def emit(address, index):
        return Value(address.b, address.b.load(_element(address, index, I64), align=8))

    return inline(_INT(_INT, _INT), emit)


@intrinsic
def put_word(typingctx, address, index, value):
    """Store an int64 as number `index` of an array at an address."""

    def emit(address, index, value):
        address.b.store(value.ir, _element(address, index, I64), align=8)

    return inline(types.void(*[_INT] * 3), emit)


@intrinsic
def enter_at(typingctx, address, argument):
    """Call the compiled function `void(void *)` at an address.

    `argument` is the address that the function receives.
    """

    def emit(address, argument):
        signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        address.b.call(address.pointer(signature), [argument.pointer(I8)])

    return inline(types.void(_INT, _INT), emit)


def _row(base, index, i, stride):
    place = Variable(i)
    with i.b.if_then((index > 0).ir):
        place.value = Value(i.b, i.b.load(_element(index, i, I64), align=8))
    return base + place.value * (stride * 4)


@intrinsic
def row(typingctx, base, index, i, stride):
    """Return the address of row `i` of a float32 matrix, whose rows have `stride` elements.

    If `index`, the address of an array of row numbers, is not 0, the row is number index[i].
    """
    return inline(_INT(*[_INT] * 4), _row)


@intrinsic
def rows(typingctx, base, index, i, stride):
    """Return the addresses of ROWS consecutive rows of a float32 matrix as a tuple; see `row`."""
    many = types.UniTuple(_INT, ROWS)

    def emit(context, b, sig, args):
        base, index, i, stride = (Value(b, arg) for arg in args)
        places = [_row(base, index, i + m, stride).ir for m in range(ROWS)]
        return context.make_tuple(b, many, places)

    return many(*[_INT] * 4), emit


@intrinsic
def claim(typingctx, address, index, amount):
    """Add atomically to an int64 of an array, and return its old value."""

    def emit(address, index, amount):
        place = _element(address, index, I64)
        return Value(address.b, address.b.atomic_rmw("add", place, amount.ir, "seq_cst"))

    return inline(_INT(*[_INT] * 3), emit)


@intrinsic
def await_(typingctx, address, index, amount):
    """Spin until an int64 of an array in memory is at least `amount`."""

    def emit(address, index, amount):
        b, place = address.b, _element(address, index, I64)
        loop, done = b.append_basic_block("wait"), b.append_basic_block("arrived")
        b.branch(loop)
        b.position_at_end(loop)
        value = Value(b, b.load_atomic(place, "acquire", 8))
        b.cbranch((value >= amount).ir, done, loop)
        b.position_at_end(done)

    return inline(types.void(*[_INT] * 3), emit)


@intrinsic
def address_of(typingctx, pointer):
    """Return a pointer as an int64 address."""
    return inline(_INT(pointer), lambda at: Value(at.b, at.b.ptrtoint(at.ir, I64)))


@intrinsic
def size_of(typingctx, kind):
    """Return the size in bytes of one weight of a weight type."""
    return inline(_INT(kind), lambda witness: witness.constant(SIZE[kind], I64))
