"""Building blocks of LLVM code: vectors of `LANES` floats, widened, rounded and summed.

Every function that emits code takes an llvmlite builder `b`; a `kind` is the Numba type that stands
for a weight type (see ir.py).
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils, codegen


def _target() -> tuple[str, set[str]]:
    """The processor that Numba compiles for, and its features: this one's, unless NUMBA_CPU_NAME,
    NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX say otherwise."""
    flags = config.CPU_FEATURES
    flags = codegen.get_host_cpu_features() if flags is None else flags
    name = config.CPU_NAME or llvm.get_host_cpu_name()
    return name, {flag[1:] for flag in flags.split(",") if flag.startswith("+")}


_NAME, FEATURES = _target()
WIDE = "avx512f" in FEATURES
LANES = 16 if WIDE else 8
ROWS = 4 if WIDE else 2  # of x in the widest tile: 16 (8) accumulators of LANES floats
COLUMNS = 4  # of the result in the widest tile
STRIP = 4  # vectors of columns in the widest tile of a transposed matrix
# Does the processor fetch one stream of memory ahead better than four that it is told of? (AMD's
# read twice as fast; Intel's want to be asked for the next four rows while four are multiplied.)
IN_TURN = _NAME.startswith("znver")
# Bytes beyond the next rows that are asked for too, into the second cache; 0: none. (AMD's first
# cache can wait for fewer lines than a tile of short rows needs.)
BEYOND = 8192 if IN_TURN else 0

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
ELEMENT = {types.uint16: I16, types.int16: I16, types.float32: F32}
SIZE = {types.uint16: 2, types.int16: 2, types.float32: 4}


def vector_of(element, lanes=None):
    return ir.VectorType(element, lanes or LANES)


def splat(value, like):
    return ir.Constant(like, [value] * like.count)


def llvm_call(b, name, result, args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def widen(b, kind, raw):
    """Weights as loaded -> float32 values, exactly; scalar or vector."""
    if kind == types.float32:
        return raw
    many = isinstance(raw.type, ir.VectorType)
    shape = (lambda t: vector_of(t, raw.type.count)) if many else (lambda t: t)
    if kind == types.int16:
        return b.fpext(b.bitcast(raw, shape(F16)), shape(F32))
    wide = b.zext(raw, shape(I32))
    sixteen = splat(16, wide.type) if many else I32(16)
    return b.bitcast(b.shl(wide, sixteen), shape(F32))


def load(b, kind, address, mask=None, lanes=None):
    """LANES weights at an address, widened; lanes beyond the mask are 0 and are not touched."""
    vector = vector_of(ELEMENT[kind], lanes)
    pointer = b.inttoptr(address, vector.as_pointer())
    if mask is None:
        raw = b.load(pointer, align=SIZE[kind])
    else:
        letter = {I16: "i16", F32: "f32"}[ELEMENT[kind]]
        name = f"llvm.masked.load.v{LANES}{letter}.p0"
        args = [pointer, I32(SIZE[kind]), mask, ir.Constant(vector, None)]
        raw = llvm_call(b, name, vector, args)
    return widen(b, kind, raw)


def store(b, value, address, mask=None):
    """Store lanes, float32 or narrowed, at an address; those beyond the mask are not touched."""
    pointer = b.inttoptr(address, value.type.as_pointer())
    size, letter = (2, "i16") if value.type.element == I16 else (4, "f32")
    if mask is None:
        b.store(value, pointer, align=size)
    else:
        name = f"llvm.masked.store.v{LANES}{letter}.p0"
        llvm_call(b, name, ir.VoidType(), [value, pointer, I32(size), mask])


def lanes_below(b, count, lanes=None):
    """The first `count` (int64) of LANES lanes, or of so many."""
    shape = vector_of(I64, lanes)
    each = ir.Constant(shape, list(range(shape.count)))
    return b.icmp_signed("<", each, broadcast(b, count, shape.count))


def prefetch(b, address, cache=1):
    """Ask for a line, into the first or the second cache; one beyond the end does no harm."""
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(prefetch, [b.inttoptr(address, byte), I32(0), I32(4 - cache), I32(1)])


def fma(b, x, y, z):
    return llvm_call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def broadcast(b, scalar, lanes=None):
    """A scalar in every lane."""
    shape = vector_of(scalar.type, lanes)
    wide = b.insert_element(ir.Constant(shape, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(wide, wide, splat(0, vector_of(I32, lanes)))


def halve(b, first, second, groups, width):
    """Fold `groups` groups of `width` lanes in each of two vectors: upper half onto lower half."""
    half, shift = width // 2, first.type.count
    both = (first,) if second is None else (first, second)
    low = [
        v * shift + g * width + i
        for v in range(len(both))
        for g in range(groups)
        for i in range(half)
    ]
    high = [i + half for i in low]
    other = first if second is None else second
    picks = [ir.Constant(vector_of(I32, len(p)), p) for p in (low, high)]
    return b.fadd(*(b.shuffle_vector(first, other, p) for p in picks))


def lane_sums(b, vectors, groups=1):
    """The sum of each vector's lanes, as one vector; the order of additions is the same for all.

    `groups`: so many runs of lanes are summed on their own, and follow one another.
    """
    width = LANES // groups
    while width > 1:
        if len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [halve(b, first, second, groups, width) for first, second in pairs]
            groups *= 2
        else:
            vectors = [halve(b, vectors[0], None, groups, width)]
        width //= 2
    return vectors[0]


def outlined(name, emit):
    """Make `emit` a function of its own, shared by all callers: a tile is long, and would
    otherwise be compiled anew at each place that it is used."""

    def call(context, b, sig, args):
        flat = []
        for kind, value in zip(sig.args, args, strict=True):
            if isinstance(kind, types.UniTuple):
                flat += cgutils.unpack_tuple(b, value)
            elif kind == types.int64:
                flat.append(value)
        kinds = [str(kind) for kind in sig.args if kind in SIZE]
        shape = ir.FunctionType(ir.VoidType(), [value.type for value in flat])
        full = ".".join(["greenroom", name, *kinds])
        tile = b.module.globals.get(full)
        if tile is None:
            tile = ir.Function(b.module, shape, full)
            tile.linkage = "linkonce_odr"
            tile.attributes.add("noinline")
            inside = ir.IRBuilder(tile.append_basic_block("entry"))
            emit(inside, sig, tile.args)
            inside.ret_void()
        b.call(tile, flat)
        return context.get_dummy_value()

    return call


def narrow(b, kind, value):
    """float32 -> the nearest `kind`, ties to even, as torch rounds; every NaN becomes the same.

    Scalar or vector.
    """
    if kind == types.float32:
        return value
    many = isinstance(value.type, ir.VectorType)
    shape = (lambda t: vector_of(t, value.type.count)) if many else (lambda t: t)
    if kind == types.int16:
        return b.bitcast(b.fptrunc(value, shape(F16)), shape(I16))

    def number(n):
        return splat(n, shape(I32)) if many else I32(n)

    bits = b.bitcast(value, shape(I32))
    odd = b.and_(b.lshr(bits, number(16)), number(1))
    near = b.lshr(b.add(bits, b.add(odd, number(0x7FFF))), number(16))
    near = b.select(b.fcmp_unordered("uno", value, value), number(0x7FC0), near)
    return b.trunc(near, shape(I16))
