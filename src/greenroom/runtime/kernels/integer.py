"""Products with encoded matrices by whole numbers: weights are not rounded to the model's type.

A row of x is turned into integers once (`pack`): 32 or 64 neighbours share a power of two, so that
the largest has 15 or 16 bits. Codes are integers already. Their products are summed exactly, eight
or four to a lane, and only those sums are scaled in float32: a 4-bit weight takes an eighth of the
instructions that expanding it to float32 takes. Where x is a number of bfloat16 that is not 64
times smaller than its largest neighbour the sums are those of exact weights and inputs.

Needs AVX-512 with VNNI (`INTEGERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.core.layout import BLOCKS
from greenroom.runtime.kernels.emit import (
    AHEAD,
    COLUMNS,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    WIDE,
    broadcast,
    fma,
    lane_sums,
    lanes_below,
    llvm_call,
    outlined,
    prefetch,
    splat,
    store,
    vector_of,
)
from greenroom.runtime.kernels.encoded import (
    F_BLOCK,
    F_CARRY,
    F_FIRST,
    F_INPUTS,
    F_LAYOUT,
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
)
from greenroom.runtime.kernels.expand import (
    E2M1,
    NAMES,
    Builder,
    Row,
    Value,
    at_byte,
    constant,
)
from greenroom.runtime.kernels.ir import address_of, word

_FEATURES = llvm.get_host_cpu_features()
INTEGERS = WIDE and all(_FEATURES.get(f"avx512{name}") for name in ("bw", "dq", "vl", "vnni"))
BLOCK = 64  # inputs that are summed on their own where the sums of blocks are asked for
LINE = 64  # bytes of a vector

Left = Value | None  # inputs of the last turn, or None: all of them
Term = tuple[int, Value, Value]  # a block of the turn, a vector, and what it is multiplied by


@dataclass(frozen=True, slots=True)
class Whole:
    """How codes of an encoding are multiplied as integers, `unit` inputs at a turn.

    terms:  (b, row, at, x, left) -> what the sums grow by; x are the vectors of `pack`
    shift:  one prepared scale for 2^shift inputs
    order:  inputs of a turn as the codes' bytes lie, for x as two bytes; (): x as 16 bits
    offset: what a code is larger by than the weight
    factor: what one of code and offset is, in weights
    apart:  are the first and the last half of `order` different sums?
    minima: are there minima, one for 32 inputs?
    paired: do the halves of a vector belong to two blocks?
    """

    terms: Callable[[Builder, Row, Value, list[Value], Left], list[Term]]
    shift: int = 5
    order: tuple[int, ...] = ()
    offset: int = 0
    factor: float = 1.0
    apart: bool = False
    minima: bool = False
    paired: bool = True

    @property
    def unit(self) -> int:
        return len(self.order) or BLOCK

    @property
    def group(self) -> int:
        """Inputs that have one power of two."""
        return max(32, 1 << self.shift)

    @property
    def vectors(self) -> int:
        """Vectors of a turn in packed x: two planes of each half, offsets, sums for minima."""
        if not self.order:
            return 2
        return 4 + (1 + self.apart if self.offset else 0) + self.minima


def room(encoding: str, inputs: int) -> int:
    """Bytes of a packed row of x."""
    whole = WHOLE[encoding]
    units = -(-inputs // whole.unit)
    return LINE * (units * whole.vectors + 1) + 4 * units * (whole.unit >> whole.shift)


# Instructions.


def _dot(name: str, b: Builder, total: Value, codes: Value, x: Value) -> Value:
    """Products of small integers, added up in lanes of 32 bits."""
    args = [b.bitcast(v, vector_of(I32)) for v in (total, codes, x)]
    return llvm_call(b, f"llvm.x86.avx512.{name}.512", vector_of(I32), args)


dot_bytes = partial(_dot, "vpdpbusd")  # codes without, x with a sign
dot_words = partial(_dot, "vpdpwssd")


def _zero() -> Value:
    return ir.Constant(vector_of(I32), None)


def _floats(b: Builder, value: Value) -> Value:
    return b.sitofp(value, vector_of(F32))


def _masked(b: Builder, address: Value, words: int, mask: Value) -> Value:
    """`words` words of 32 bits, those beyond the mask 0 and not touched."""
    kind = vector_of(I32, words)
    args = [b.inttoptr(address, kind.as_pointer()), I32(1), mask, ir.Constant(kind, None)]
    return llvm_call(b, f"llvm.masked.load.v{words}i32.p0", kind, args)


def _raw(b: Builder, address: Value, words: int) -> Value:
    return b.load(b.inttoptr(address, vector_of(I32, words).as_pointer()), align=1)


def _block(b: Builder, address: Value, words: int, number: int, left: Left) -> Value:
    """Codes of block `number` of the 32 inputs of a turn, 0 where it does not exist."""
    if left is None or number == 0:
        return _raw(b, address, words)
    there = b.icmp_signed(">", left, I64(32 * number))
    return _masked(b, address, words, broadcast(b, there, words))


def _joined(b: Builder, parts: Sequence[Value]) -> Value:
    """Equal vectors, one after another."""
    while len(parts) > 1:
        n = parts[0].type.count
        picks = constant(list(range(2 * n)), I32)
        parts = [
            b.shuffle_vector(u, v, picks) for u, v in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _halves(b: Builder, raw: Value) -> tuple[Value, Value]:
    """The lower and the upper four bits of bytes."""
    kind = vector_of(I8, LINE)
    words = vector_of(I16, LINE // 2)
    upper = b.lshr(b.bitcast(raw, words), splat(4, words))
    return tuple(b.and_(b.bitcast(v, kind), splat(15, kind)) for v in (raw, upper))


def _spread(b: Builder, address: Value, lanes: Sequence[int]) -> Value:
    """Lane i takes float number lanes[i] of the four at an address."""
    four = b.load(b.inttoptr(address, vector_of(F32, 4).as_pointer()), align=4)
    return b.shuffle_vector(four, four, constant(list(lanes), I32))


def _ready(b: Builder, row: Row, at: Value, shift: int, offset: int = 0) -> Value:
    return at_byte(b, row.ready, b.shl(b.lshr(at, I64(shift)), I64(2)), 4 * offset)


FOURS = tuple(i // 4 for i in range(16))


# Turns.


def _product(b: Builder, codes: Value, x: list[Value], side: int, start: Value) -> Value:
    """Codes times one half of a turn's x."""
    upper = dot_bytes(b, _zero(), codes, x[side])
    return b.add(b.shl(upper, splat(7, upper.type)), dot_bytes(b, start, codes, x[2 + side]))


def _together(
    b: Builder, row: Row, at: Value, codes: Sequence[Value], x: list[Value]
) -> list[Term]:
    """Both halves of a turn lie in one vector of sums, four lanes to a group."""
    low, high = codes
    upper = dot_bytes(b, dot_bytes(b, _zero(), low, x[0]), high, x[1])
    lower = dot_bytes(b, dot_bytes(b, x[4], low, x[2]), high, x[3])
    total = b.add(b.shl(upper, splat(7, upper.type)), lower)
    return [(0, _floats(b, total), _spread(b, _ready(b, row, at, 5), FOURS))]


def _neighbours(b: Builder, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Two codes a byte that are neighbours: 64 bytes."""
    address = at_byte(b, row.codes, b.lshr(at, I64(1)))
    if left is None:
        return _halves(b, _raw(b, address, 16))
    return _halves(b, _masked(b, address, 16, lanes_below(b, b.lshr(left, I64(3)))))


def _blocks(width: int, b: Builder, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """The 16 bytes that end each of four blocks of `width` bytes."""
    first = at_byte(b, row.codes, b.mul(b.lshr(at, I64(5)), I64(width)), width - 16)
    return _halves(
        b, _joined(b, [_block(b, at_byte(b, first, width * i), 4, i, left) for i in range(4)])
    )


def _linear(read: Any, b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    return _together(b, row, at, read(b, row, at, left), x)


def _table(read: Any, b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    """e2m1 codes: twice their values plus 12."""
    values = [int(2 * v) for v in E2M1]
    table = constant([12 + v for v in values] * 1 + [12 - v for v in values], I8)
    table = _joined(b, [table] * 4)
    codes = read(b, row, at, left)
    kind = table.type
    codes = [llvm_call(b, "llvm.x86.avx512.pshuf.b.512", kind, [table, code]) for code in codes]
    return _together(b, row, at, codes, x)


def _int8(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, total = at_byte(b, row.codes, at), _zero()
    for i in range(2):
        total = dot_words(b, total, _signed(b, _raw(b, at_byte(b, first, 32 * i), 8)), x[i])
    scale = b.load(b.inttoptr(_ready(b, row, at, 6), F32.as_pointer()), align=4)
    return [(0, _floats(b, total), broadcast(b, scale))]


def _q8_0(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, terms = at_byte(b, row.codes, at, b.lshr(at, I64(4)), 2), []
    for i in range(2):
        codes = _signed(b, _block(b, at_byte(b, first, 34 * i), 8, i, left))
        place = _ready(b, row, at, 5, i)
        scale = b.load(b.inttoptr(place, F32.as_pointer()), align=4)
        terms.append((0, _floats(b, dot_words(b, _zero(), codes, x[i])), broadcast(b, scale)))
    return terms


def _signed(b: Builder, raw: Value) -> Value:
    return b.sext(b.bitcast(raw, vector_of(I8, 32)), vector_of(I16, 32))


def _super_block(b: Builder, row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """(the block of 256 inputs, which half of it)."""
    start = at_byte(b, row.codes, b.mul(b.lshr(at, I64(8)), I64(width)))
    return start, b.and_(b.lshr(at, I64(7)), I64(1))


def _q4_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 144)
    raw = _raw(b, at_byte(b, start, 16, b.shl(side, I64(6))), 16)
    return _with_minima(b, row, at, _halves(b, raw), x)


def _q5_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 176)
    four = _halves(b, _raw(b, at_byte(b, start, 48, b.shl(side, I64(6))), 16))
    fifth = b.bitcast(_twice(b, _raw(b, at_byte(b, start, 16), 8)), vector_of(I16, 32))
    # Bit 4 side + 2 (upper half of the vector) + which half of the codes goes to bit 4.
    fifth = b.lshr(fifth, broadcast(b, b.trunc(b.shl(side, I64(2)), I16), 32))
    codes = []
    for i, low in enumerate(four):
        moved = b.shl(fifth, constant([4 - i] * 16 + [2 - i] * 16, I16))
        bit = b.and_(b.bitcast(moved, low.type), splat(16, low.type))
        codes.append(b.or_(low, bit))
    return _with_minima(b, row, at, codes, x)


def _twice(b: Builder, half: Value) -> Value:
    return b.shuffle_vector(half, half, constant([*range(8)] * 2, I32))


def _with_minima(
    b: Builder, row: Row, at: Value, codes: Sequence[Value], x: list[Value]
) -> list[Term]:
    """q4_k and q5_k: groups 0 and 2 in one half of a turn, 1 and 3 in the other."""
    place, terms = _ready(b, row, at, 5), []
    for i, code in enumerate(codes):
        scale = _spread(b, place, [i] * 8 + [2 + i] * 8)
        terms.append((0, _floats(b, _product(b, code, x, i, _zero())), scale))
    minima = b.add(b.sub(row.minima, row.ready), place)
    sums = b.bitcast(x[4], vector_of(F32))
    return [*terms, (0, sums, _spread(b, minima, [0, 1, 2, 3] * 4))]


MINIMA = (0, 1, 10, 11)  # lanes in which packed x has the sums of four groups


def _q6_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 210)
    four = _halves(b, _raw(b, at_byte(b, start, b.shl(side, I64(6))), 16))
    two = b.bitcast(_twice(b, _raw(b, at_byte(b, start, 128, b.shl(side, I64(5))), 8)), I16X32)
    moved = (
        b.shl(two, constant([4] * 16 + [2] * 16, I16)),
        b.lshr(two, constant([0] * 16 + [2] * 16, I16)),
    )
    terms = []
    for i, (low, high) in enumerate(zip(four, moved, strict=True)):
        code = b.or_(low, b.and_(b.bitcast(high, low.type), splat(48, low.type)))
        scale = _spread(b, _ready(b, row, at, 4, 4 * i), FOURS)
        terms.append((i, _floats(b, _product(b, code, x, i, x[4 + i])), scale))
    return terms


I16X32 = vector_of(I16, 32)
_RUN = range(128)
NEIGHBOURS = (*_RUN[::2], *_RUN[1::2])


def _runs(length: int) -> tuple[int, ...]:
    """Runs of inputs take turns in the two halves."""
    return tuple(sorted(_RUN, key=lambda i: (i // length % 2, i)))


WHOLE: dict[str, Whole] = {
    "int8": Whole(_int8, shift=6, paired=False),
    "q8_0": Whole(_q8_0, paired=False),
    "int4": Whole(partial(_linear, _neighbours), order=NEIGHBOURS, offset=8),
    "mxfp4": Whole(partial(_table, _neighbours), order=NEIGHBOURS, offset=12, factor=0.5),
    "q4_0": Whole(partial(_linear, partial(_blocks, 18)), order=_runs(16), offset=8),
    "gguf_mxfp4": Whole(partial(_table, partial(_blocks, 17)), order=_runs(16), offset=12),
    "q4_k": Whole(_q4_k, order=_runs(32), apart=True, minima=True),
    "q5_k": Whole(_q5_k, order=_runs(32), apart=True, minima=True),
    "q6_k": Whole(_q6_k, shift=4, order=_runs(64), offset=32, apart=True, paired=False),
}


def _named(encoding: Any) -> tuple[str, Whole]:
    name = NAMES[encoding.literal_value]
    return name, WHOLE[name]


# x as integers.


def _reduced(b: Builder, name: str, value: Value) -> Value:
    return llvm_call(b, f"llvm.vector.reduce.{name}.v{LANES}i32", I32, [value])


def _least(b: Builder, value: Value, other: int) -> Value:
    most = splat(other, value.type)
    return b.select(b.icmp_signed("<", value, most), value, most)


def _group(b: Builder, whole: Whole, vectors: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Neighbours as integers times a power of two, which is NaN where one of them is no number."""
    top = 13 if whole.order else 14
    largest = ir.Constant(vector_of(I32), None)
    for v in vectors:
        bits = b.and_(b.bitcast(v, vector_of(I32)), splat(0x7FFFFFFF, vector_of(I32)))
        largest = b.select(b.icmp_signed(">", bits, largest), bits, largest)
    exponent = b.lshr(_reduced(b, "umax", largest), I32(23))
    bounded = b.select(b.icmp_signed("<", exponent, I32(40)), I32(40), exponent)
    power = b.shl(b.sub(bounded, I32(top)), I32(23))
    power = b.select(b.icmp_signed("==", exponent, I32(255)), I32(0x7FC00000), power)
    inverse = b.bitcast(b.shl(b.sub(I32(254 + top), bounded), I32(23)), F32)
    wide = broadcast(b, inverse)
    integers = []
    for v in vectors:  # rounded to the nearest by adding 1.5 * 2^23
        moved = fma(b, v, wide, splat(12582912.0, v.type))
        value = b.sub(b.bitcast(moved, vector_of(I32)), splat(0x4B400000, vector_of(I32)))
        integers.append(_least(b, value, (2 << top) - 1))
    return b.bitcast(power, F32), integers


def _planes(b: Builder, whole: Whole, integers: Sequence[Value]) -> list[Value]:
    """A turn's integers as vectors of 64 bytes."""
    if not whole.order:
        words = [b.trunc(v, vector_of(I16)) for v in integers]
        return [_joined(b, words[:2]), _joined(b, words[2:])]
    seven = splat(7, vector_of(I32))
    upper = [b.trunc(b.ashr(v, seven), vector_of(I8)) for v in integers]
    lower = [b.trunc(b.and_(v, splat(127, v.type)), vector_of(I8)) for v in integers]
    planes = []
    for plane in (_joined(b, upper), _joined(b, lower)):
        for half in (whole.order[:LINE], whole.order[LINE:]):
            planes.append(b.shuffle_vector(plane, plane, constant(list(half), I32)))
    return planes


def _offsets(b: Builder, whole: Whole, planes: list[Value]) -> list[Value]:
    """What sums of codes begin with: -offset times the sum of a lane's x."""
    ones = splat(1, vector_of(I8, LINE))
    sides = [_product(b, ones, planes, side, _zero()) for side in range(2)]
    sums = sides if whole.apart else [b.add(*sides)]
    return [b.mul(v, splat(-whole.offset, v.type)) for v in sums]


def _powers(b: Builder, whole: Whole, x: Value, K: Value) -> Value:
    units = b.udiv(b.add(K, I64(whole.unit - 1)), I64(whole.unit))
    return b.add(x, b.mul(units, I64(LINE * whole.vectors)))


@intrinsic(prefer_literal=True)
def pack(typingctx, encoding, x, K, out):
    """Turn x [K] (float32) into integers for a matrix of an encoding; `room` bytes."""
    name, whole = _named(encoding)
    unit, group = whole.unit, whole.group

    def emit(b, sig, args):
        x, K, out = args
        units = b.udiv(b.add(K, I64(unit - 1)), I64(unit))
        powers = _powers(b, whole, out, K)

        def turn(number):
            at = b.mul(number, I64(unit))
            integers, sums = [], []
            for start in range(0, unit, group):
                here = b.add(at, I64(start))
                there = b.icmp_signed("<", here, K)
                mask = broadcast(b, there, LANES)
                vectors = [
                    b.bitcast(
                        _masked(b, at_byte(b, x, b.shl(here, I64(2)), 4 * i), 16, mask),
                        vector_of(F32),
                    )
                    for i in range(0, group, LANES)
                ]
                power, found = _group(b, whole, vectors)
                integers += found
                place = b.add(powers, b.shl(b.lshr(here, I64(whole.shift)), I64(2)))
                kept = b.fmul(power, F32(whole.factor))
                for i in range(group >> whole.shift):
                    b.store(kept, b.inttoptr(at_byte(b, place, 4 * i), F32.as_pointer()), align=4)
                if whole.minima:
                    total = _reduced(b, "add", b.add(*found))
                    sums.append(b.fmul(b.sitofp(total, F32), power))
            planes = _planes(b, whole, integers)
            if whole.offset:
                planes += _offsets(b, whole, planes)
            if whole.minima:
                vector = ir.Constant(vector_of(F32), None)
                for value, lane in zip(sums, MINIMA, strict=True):
                    vector = b.insert_element(vector, value, I32(lane))
                planes.append(vector)
            target = b.add(out, b.mul(number, I64(LINE * whole.vectors)))
            for i, plane in enumerate(planes):
                store(b, plane, at_byte(b, target, LINE * i))

        with cgutils.for_range_slice(b, I64(0), units, I64(1), I64) as (number, _):
            turn(number)

    return types.void(encoding, *[types.int64] * 3), outlined(f"pack.{name}", emit)


# Products.


@intrinsic(prefer_literal=True)
def powers_at(typingctx, encoding, x, K):
    """Address of the powers of two in packed x."""
    _, whole = _named(encoding)

    def emit(context, b, sig, args):
        return _powers(b, whole, *args[1:])

    return types.int64(encoding, types.int64, types.int64), emit


def _tile(columns: int) -> Any:
    """`tile(encoding, codes, ld, ready, step, K, block, carry, x, out)`: `columns` rows of weights.

    Their scales lie `step` bytes apart; x is packed. `block` is K or 64.
    """

    @intrinsic(prefer_literal=True)
    def tile(typingctx, encoding, codes, ld, ready, step, K, block, carry, x, out):
        name, whole = _named(encoding)

        def emit(b, sig, args):
            inputs, nbytes = BLOCKS[name]
            _emit_tile(b, whole, columns, whole.unit * nbytes // inputs, *args)

        signature = types.void(encoding, *[types.int64] * 9)
        return signature, outlined(f"integer{columns}.{name}", emit)

    return tile


def _emit_tile(b, whole, columns, nbytes, codes, ld, ready, step, K, block, carry, x, out):
    zero = ir.Constant(vector_of(F32), None)
    short = vector_of(F32, columns)
    sums = cgutils.alloca_once_value(b, ir.Constant(short, None))
    place = b.inttoptr(out, short.as_pointer())
    with b.if_then(b.icmp_signed("!=", carry, carry.type(0))):
        b.store(b.load(place, align=4), sums)
    rows = []
    for n in range(columns):
        scale = b.add(ready, b.mul(step, I64(n)))
        minima = b.add(scale, b.lshr(K, I64(3)))
        rows.append(Row(b.add(codes, b.mul(ld, I64(n))), None, scale, minima, K, None))
    cells = [cgutils.alloca_once_value(b, zero) for _ in range(columns)]

    def turn(at: Value, left: Left, add: Callable[[int, int, Value, Value], None]) -> None:
        number = b.udiv(at, I64(whole.unit))
        here = b.add(x, b.mul(number, I64(LINE * whole.vectors)))
        vectors = [_raw(b, at_byte(b, here, LINE * i), 16) for i in range(whole.vectors)]
        for n, row in enumerate(rows):
            behind = b.add(row.codes, b.add(b.mul(number, I64(nbytes)), b.mul(ld, I64(AHEAD))))
            for line in range(0, nbytes, LINE):
                prefetch(b, at_byte(b, behind, line))
            for block, value, factor in whole.terms(b, row, at, vectors, left):
                add(n, block, value, factor)

    def turns(one: Callable[[Value, Left], None]) -> None:
        left = b.and_(K, I64(whole.unit - 1))
        with cgutils.for_range_slice(b, I64(0), b.sub(K, left), I64(whole.unit), I64) as (at, _):
            one(at, None)
        with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
            one(b.sub(K, left), left)

    def grow(n: int, block: int, value: Value, factor: Value) -> None:
        b.store(fma(b, value, factor, b.load(cells[n])), cells[n])

    def in_blocks(at: Value, left: Left) -> None:
        found: dict[tuple[int, int], Value] = {}

        def add(n: int, block: int, value: Value, factor: Value) -> None:
            old = found.get((block, n))
            found[block, n] = b.fmul(value, factor) if old is None else fma(b, value, factor, old)

        turn(at, left, add)
        for block in sorted({block for block, _ in found}):
            vectors = [found[block, n] for n in range(columns)]
            total = lane_sums(b, vectors, 2 if whole.paired else 1)
            for i in range(2 if whole.paired else 1):
                part = [i + n * (2 if whole.paired else 1) for n in range(columns)]
                value = b.shuffle_vector(total, total, constant(part, I32))
                b.store(b.fadd(b.load(sums), value), sums)

    with b.if_else(b.icmp_signed("==", block, I64(BLOCK))) as (short_blocks, one_block):
        with short_blocks:
            turns(in_blocks)
        with one_block:
            turns(lambda at, left: turn(at, left, grow))
            total = lane_sums(b, [b.load(cell) for cell in cells])
            b.store(b.fadd(b.load(sums), total), sums)
    b.store(b.load(sums), place, align=4)


tile_1, tile_4 = _tile(1), _tile(COLUMNS)


def product(kind, stamp, encoding):
    """As `encoded.product`, by integers: x is packed; no rows: pack x into `out`."""

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
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
        powers = powers_at(encoding, x, K)
        n = 0
        while n < rows:
            count = COLUMNS if rows - n >= COLUMNS and x != 0 else 1
            w, y = codes + n * ld, out + 4 * n
            for i in range(count):
                scale = scales + (first + n + i) // together * apart
                if x == 0:
                    prepare(encoding, w, scale, scratch, K, share, 0)
                else:
                    prepare_times(encoding, w + i * ld, scale, scratch + i * step, K, share, powers)
            if x == 0:
                expand(encoding, kind, w, scratch, K, out + 4 * n * K)
            elif count == 1:
                tile_1(encoding, w, ld, scratch, step, K, block, carry, x, y)
            else:
                tile_4(encoding, w, ld, scratch, step, K, block, carry, x, y)
            n += count

    return enter
