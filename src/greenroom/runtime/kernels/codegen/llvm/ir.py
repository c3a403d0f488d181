"""Vector code for the kernels: what Numba's own front end cannot say.

Everything here becomes LLVM vectors of `LANES` floats, so that sums have one fixed order on a
given machine: a dot product is summed lane by lane, the lanes by halving, and the blocks of
`block` elements one after another. An element of the result depends on its own row and column
only, never on the tile that it was computed in, on its neighbours or on the threads.

A weight type is chosen by a witness value: `np.uint16(0)` bfloat16, `np.int16(0)` float16,
`np.float32(0)` float32. Addresses are plain int64.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.llvm.emit import (
    COLUMNS,
    ELEMENT,
    F32,
    I32,
    I64,
    IN_TURN,
    LANES,
    ROWS,
    SIZE,
    STRIP,
    broadcast,
    fma,
    lane_sums,
    lanes_below,
    load,
    narrow,
    outlined,
    prefetch,
    store,
    vector_of,
    widen,
)


def _ends(rows):
    return [types.UniTuple(types.int64, rows)] * 2


def _dot(rows, columns):
    """`dot(kind, xkind, w, ld, K, block, carry, x, out)`: a tile of x @ w.T.

    `w` is the address of the first of `columns` weight rows of K elements, `ld` bytes apart;
    each of the `rows` addresses x is a row of K elements of xkind; each of the addresses in out
    takes `columns` floats, which are added to where `carry` is set.

    The rows of weights are read side by side, or, where it is one product of one row on a processor
    that wants it so (IN_TURN), one after the other: the sums are the same.
    """

    @intrinsic
    def dot(typingctx, kind, xkind, w, ld, K, block, carry, x, out):
        def emit(b, sig, args):
            _Dot(b, kind, xkind, rows, columns, args).emit()

        signature = types.void(kind, xkind, *[types.int64] * 5, *_ends(rows))
        return signature, outlined(f"dot{rows}x{columns}", emit)

    return dot


class _Dot:
    """The code of a `dot`."""

    def __init__(self, b, kind, xkind, rows, columns, args):
        self.b, self.kind, self.xkind, self.rows, self.columns = b, kind, xkind, rows, columns
        self.w, self.ld, self.K, self.block, self.carry, *ends = args
        self.xs, self.outs = ends[:rows], ends[rows:]
        self.in_turn = IN_TURN and rows == 1 and columns > 1
        self.sums = cgutils.alloca_once(b, vector_of(F32, rows * columns))
        self.cells = [cgutils.alloca_once(b, vector_of(F32)) for _ in range(rows * columns)]

    def emit(self):
        b, rows, columns = self.b, self.rows, self.columns
        b.store(ir.Constant(vector_of(F32, rows * columns), [0.0] * (rows * columns)), self.sums)
        with b.if_then(b.icmp_signed("!=", self.carry, self.carry.type(0))):
            value = b.load(self.sums)
            for m in range(rows):
                for n in range(columns):
                    place = b.add(self.outs[m], I64(4 * n))
                    old = b.load(b.inttoptr(place, F32.as_pointer()), align=4)
                    value = b.insert_element(value, old, I32(m * columns + n))
            b.store(value, self.sums)
        with cgutils.for_range_slice(b, I64(0), self.K, self.block, I64) as (start, _):
            self.one_block(start)
        final = b.load(self.sums)
        for m in range(rows):
            part = list(range(m * columns, (m + 1) * columns))
            picks = ir.Constant(vector_of(I32, columns), part)
            store(b, b.shuffle_vector(final, final, picks), self.outs[m])

    def one_block(self, start):
        """Add the products of `block` elements from element `start` on to the sums."""
        b, every = self.b, range(self.columns)
        for cell in self.cells:
            b.store(ir.Constant(vector_of(F32), [0.0] * LANES), cell)
        stop = b.add(start, self.block)
        stop = b.select(b.icmp_signed("<", stop, self.K), stop, self.K)
        left = b.and_(b.sub(stop, start), I64(LANES - 1))
        end = b.sub(stop, left)
        if self.in_turn:
            whole = b.icmp_signed(">=", self.block, self.K)
            with b.if_else(whole) as (one_block, blocks):
                with one_block:
                    for n in every:
                        self.steps(start, end, [n])
                with blocks:
                    self.steps(start, end, every)
        else:
            self.steps(start, end, every)
        with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
            self.step(end, every, lanes_below(b, left))
        total = lane_sums(b, [b.load(cell) for cell in self.cells])
        b.store(b.fadd(b.load(self.sums), total), self.sums)

    def steps(self, start, stop, of):
        with cgutils.for_range_slice(self.b, start, stop, I64(LANES), I64) as (at, _):
            self.step(at, of)

    def step(self, at, of, mask=None):
        """Multiply LANES elements from element `at` of some rows of weights."""
        b = self.b
        xat = b.mul(at, I64(SIZE[self.xkind]))
        wat = b.add(self.w, b.mul(at, I64(SIZE[self.kind])))
        xv = [load(b, self.xkind, b.add(x, xat), mask) for x in self.xs]
        if self.rows == 1 and len(of) > 1 and mask is None:
            self.ask(wat, at)
        for n in of:
            wv = load(b, self.kind, b.add(wat, b.mul(self.ld, I64(n))), mask)
            for m in range(self.rows):
                cell = self.cells[m * self.columns + n]
                b.store(fma(b, xv[m], wv, b.load(cell)), cell)

    def ask(self, wat, at):
        """For what the next rows are multiplied with, while these are."""
        b, columns = self.b, self.columns
        if not self.in_turn:
            for n in range(columns):
                prefetch(b, b.add(wat, b.mul(self.ld, I64(n + columns))))
            return
        turn = SIZE[self.kind] * columns
        behind = b.add(b.add(self.w, b.mul(self.ld, I64(columns))), b.mul(at, I64(turn)))
        for line in range(0, turn * LANES, 64):
            prefetch(b, b.add(behind, I64(line)))


def _axpy(rows, vectors):
    """`axpy(kind, w, ld, K, block, carry, count, x, out)`: a tile of x @ w, w transposed.

    `w` is the address of K weight rows, `ld` bytes apart, of which `vectors * LANES` columns are
    used, or `count` where there is one vector. x and out as in `dot`, with x in float32.
    """

    @intrinsic
    def axpy(typingctx, kind, w, ld, K, block, carry, count, x, out):
        def emit(b, sig, args):
            w, ld, K, block, carry, count, *ends = args
            xs, outs = ends[:rows], ends[rows:]
            mask = lanes_below(b, count) if vectors == 1 else None
            zero = ir.Constant(vector_of(F32), [0.0] * LANES)
            tile = [(m, n) for m in range(rows) for n in range(vectors)]
            cells = [cgutils.alloca_once(b, vector_of(F32)) for _ in tile]
            fresh = b.icmp_signed("==", carry, carry.type(0))
            with cgutils.for_range_slice(b, I64(0), K, block, I64) as (start, _):
                for cell in cells:
                    b.store(zero, cell)
                stop = b.add(start, block)
                stop = b.select(b.icmp_signed("<", stop, K), stop, K)
                with cgutils.for_range_slice(b, start, stop, I64(1), I64) as (at, _):
                    wat = b.add(w, b.mul(at, ld))
                    size = SIZE[kind] * LANES
                    wv = [load(b, kind, b.add(wat, I64(size * n)), mask) for n in range(vectors)]
                    for m in range(rows):
                        place = b.add(xs[m], b.mul(at, I64(4)))
                        xv = broadcast(b, b.load(b.inttoptr(place, F32.as_pointer()), align=4))
                        for n in range(vectors):
                            cell = cells[m * vectors + n]
                            b.store(fma(b, xv, wv[n], b.load(cell)), cell)
                first = b.and_(fresh, b.icmp_signed("==", start, I64(0)))
                for (m, n), cell in zip(tile, cells, strict=True):
                    place = b.add(outs[m], I64(4 * LANES * n))
                    before = b.select(first, zero, load(b, types.float32, place, mask))
                    store(b, b.fadd(before, b.load(cell)), place, mask)

        signature = types.void(kind, *[types.int64] * 6, *_ends(rows))
        return signature, outlined(f"axpy{rows}x{vectors}", emit)

    return axpy


def _panel(depth):
    """`panel(kind, w, ld, N, x, out)`: out[:N] += x[:depth] @ w[:depth, :N], w transposed.

    Reads `depth` rows of the matrix side by side. N is a multiple of LANES; x and out float32.
    """

    @intrinsic
    def panel(typingctx, kind, w, ld, N, x, out):
        def emit(b, sig, args):
            w, ld, N, x, out = args
            rows = [b.add(w, b.mul(ld, I64(k))) for k in range(depth)]
            xs = []
            for k in range(depth):
                pointer = b.inttoptr(b.add(x, I64(4 * k)), F32.as_pointer())
                xs.append(broadcast(b, b.load(pointer, align=4)))
            with cgutils.for_range_slice(b, I64(0), N, I64(LANES), I64) as (at, _):
                place = b.add(out, b.mul(at, I64(4)))
                value, offset = load(b, types.float32, place), b.mul(at, I64(SIZE[kind]))
                for k in range(depth):
                    here = b.add(rows[k], offset)
                    prefetch(b, b.add(here, b.mul(ld, I64(depth))))
                    value = fma(b, xs[k], load(b, kind, here), value)
                store(b, value, place)

        signature = types.void(kind, *[types.int64] * 5)
        return signature, outlined(f"panel{depth}", emit)

    return panel


panel_1, panel_8 = _panel(1), _panel(8)
dot_1x1, dot_1x4, dot_many = _dot(1, 1), _dot(1, COLUMNS), _dot(ROWS, COLUMNS)
axpy_1x1, axpy_many = _axpy(1, 1), _axpy(ROWS, STRIP)


@intrinsic
def get(typingctx, kind, address, index):
    """Element `index` of a row of `kind` at an address, widened to float32."""

    def emit(context, b, sig, args):
        _, address, index = args
        pointer = b.inttoptr(address, ELEMENT[kind].as_pointer())
        return widen(b, kind, b.load(b.gep(pointer, [index]), align=SIZE[kind]))

    return types.float32(kind, types.int64, types.int64), emit


@intrinsic
def put(typingctx, kind, address, index, value):
    """Round a float32 value to `kind` and store it as element `index` of a row at an address."""

    def emit(context, b, sig, args):
        _, address, index, value = args
        pointer = b.inttoptr(address, ELEMENT[kind].as_pointer())
        b.store(narrow(b, kind, value), b.gep(pointer, [index]), align=SIZE[kind])
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), emit


@intrinsic
def rounded(typingctx, kind, value):
    """A float32 value rounded to `kind`, as float32."""

    def emit(context, b, sig, args):
        return widen(b, kind, narrow(b, kind, args[1]))

    return types.float32(kind, types.float32), emit


@intrinsic
def bits_of(typingctx, value):
    return types.int32(types.float32), lambda context, b, sig, args: b.bitcast(args[0], I32)


@intrinsic
def float_of(typingctx, bits):
    return types.float32(types.int32), lambda context, b, sig, args: b.bitcast(args[0], F32)


@intrinsic
def word(typingctx, address, index):
    """int64 number `index` at an address."""

    def emit(context, b, sig, args):
        pointer = b.inttoptr(args[0], I64.as_pointer())
        return b.load(b.gep(pointer, [args[1]]), align=8)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def put_word(typingctx, address, index, value):
    """Store int64 number `index` at an address."""

    def emit(context, b, sig, args):
        pointer = b.inttoptr(args[0], I64.as_pointer())
        b.store(args[2], b.gep(pointer, [args[1]]), align=8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def enter_at(typingctx, address, argument):
    """Call the compiled `void(void *)` at an address."""

    def emit(context, b, sig, args):
        byte = ir.IntType(8).as_pointer()
        body = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        b.call(b.inttoptr(args[0], body), [b.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def row(typingctx, base, index, i, stride):
    """Address of row `i` of a float32 matrix, or of row `index[i]` where there is an index."""

    def emit(context, b, sig, args):
        base, index, i, stride = args
        place = cgutils.alloca_once_value(b, i)
        with b.if_then(b.icmp_signed("!=", index, I64(0))):
            pointer = b.gep(b.inttoptr(index, I64.as_pointer()), [i])
            b.store(b.load(pointer, align=8), place)
        return b.add(base, b.mul(b.load(place), b.mul(stride, I64(4))))

    return types.int64(*[types.int64] * 4), emit


@intrinsic
def claim(typingctx, address, index, amount):
    """Add to int64 number `index` at an address, atomically; returns what it was."""

    def emit(context, b, sig, args):
        pointer = b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]])
        return b.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(*[types.int64] * 3), emit


@intrinsic
def await_(typingctx, address, index, amount):
    """Spin until int64 number `index` at an address has reached an amount."""

    def emit(context, b, sig, args):
        pointer = b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]])
        loop, done = b.append_basic_block("wait"), b.append_basic_block("arrived")
        b.branch(loop)
        b.position_at_end(loop)
        value = b.load_atomic(pointer, "acquire", 8)
        b.cbranch(b.icmp_signed(">=", value, args[2]), done, loop)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def address_of(typingctx, pointer):
    return types.int64(pointer), lambda context, b, sig, args: b.ptrtoint(args[0], I64)


@intrinsic
def size_of(typingctx, kind):
    """Bytes of a weight of `kind`."""
    return types.int64(kind), lambda context, b, sig, args: I64(SIZE[kind])


STACK = 64  # floats


@intrinsic
def stack(typingctx):
    """Address of STACK floats that live until the function returns."""

    def emit(context, b, sig, args):
        memory = cgutils.alloca_once(b, ir.ArrayType(F32, STACK))
        memory.align = 64
        return b.ptrtoint(memory, I64)

    return types.int64(), emit
