"""How codes of each encoding are multiplied as integers: LLVM code for a turn of 64 or 128 inputs.

`WHOLE` names the encodings. Codes of four to eight bits are multiplied with the bytes or words that
x was turned into (packing.py), and summed exactly, eight or four products to a lane; what a lane
has is then multiplied by a scale in float32. A code may be larger than its weight by an offset:
x times that is subtracted by beginning the sum with it.

Needs AVX-512 with VNNI (`INTEGERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from greenroom.runtime.kernels.codegen.formats.expand import (
    E2M1,
    NAMES,
)
from greenroom.runtime.kernels.codegen.formats.row import (
    Builder,
    Row,
    Value,
    at_byte,
    constant,
    float_at,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    WIDE,
    broadcast,
    lanes_below,
    llvm_call,
    splat,
    vector_of,
)

INTEGERS = WIDE and {f"avx512{name}" for name in ("bw", "dq", "vl", "vnni")} <= FEATURES
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
    alone:  so little to compute that rows are read one after the other where IN_TURN says so?
    """

    terms: Callable[[Builder, Row, Value, list[Value], Left], list[Term]]
    shift: int = 5
    order: tuple[int, ...] = ()
    offset: int = 0
    factor: float = 1.0
    apart: bool = False
    minima: bool = False
    paired: bool = True
    alone: bool = False

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


# Instructions.


def _dot(name: str, b: Builder, total: Value, codes: Value, x: Value) -> Value:
    """Products of small integers, added up in lanes of 32 bits."""
    args = [b.bitcast(v, vector_of(I32)) for v in (total, codes, x)]
    return llvm_call(b, f"llvm.x86.avx512.{name}.512", vector_of(I32), args)


dot_bytes = partial(_dot, "vpdpbusd")  # codes without, x with a sign
dot_words = partial(_dot, "vpdpwssd")


def zero() -> Value:
    return ir.Constant(vector_of(I32), None)


def _floats(b: Builder, value: Value) -> Value:
    return b.sitofp(value, vector_of(F32))


def masked(b: Builder, address: Value, words: int, mask: Value) -> Value:
    """`words` words of 32 bits, those beyond the mask 0 and not touched."""
    kind = vector_of(I32, words)
    args = [b.inttoptr(address, kind.as_pointer()), I32(1), mask, ir.Constant(kind, None)]
    return llvm_call(b, f"llvm.masked.load.v{words}i32.p0", kind, args)


def words_from(b: Builder, address: Value, words: int) -> Value:
    return b.load(b.inttoptr(address, vector_of(I32, words).as_pointer()), align=1)


def _block(b: Builder, address: Value, words: int, number: int, left: Left) -> Value:
    """Codes of block `number` of the 32 inputs of a turn, 0 where it does not exist."""
    if left is None or number == 0:
        return words_from(b, address, words)
    there = b.icmp_signed(">", left, I64(32 * number))
    return masked(b, address, words, broadcast(b, there, words))


def joined(b: Builder, parts: Sequence[Value]) -> Value:
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


def _scales(
    b: Builder,
    base: Value,
    at: Value,
    left: Left,
    lanes: Sequence[int],
    shift: int = 5,
    first: int = 0,
) -> Value:
    """Lane i takes the prepared scale, or minimum, of group first + lanes[i] of a turn.

    lanes[i] is less than 4. The scale is 0 where the row has no such group: codes and x are 0 there
    too, but memory that nobody wrote may hold NaN, and 0 times NaN is NaN.
    """
    place = at_byte(b, base, b.shl(b.lshr(at, I64(shift)), I64(2)), 4 * first)
    if left is None and len(set(lanes)) == 1:
        return float_at(b, at_byte(b, place, 4 * lanes[0]))
    if left is None:
        four = b.load(b.inttoptr(place, vector_of(F32, 4).as_pointer()), align=4)
    else:
        there = lanes_below(b, b.sub(b.lshr(left, I64(shift)), I64(first)), 4)
        four = b.bitcast(masked(b, place, 4, there), vector_of(F32, 4))
    return b.shuffle_vector(four, four, constant(list(lanes), I32))


ALL, FOURS = (0,) * 16, tuple(i // 4 for i in range(16))


# Turns.


def times(b: Builder, codes: Value, x: list[Value], side: int, start: Value) -> Value:
    """Codes times one half of a turn's x."""
    upper = dot_bytes(b, zero(), codes, x[side])
    return b.add(b.shl(upper, splat(7, upper.type)), dot_bytes(b, start, codes, x[2 + side]))


def _together(
    b: Builder, row: Row, at: Value, codes: Sequence[Value], x: list[Value], left: Left
) -> list[Term]:
    """Both halves of a turn lie in one vector of sums, four lanes to a group."""
    low, high = codes
    upper = dot_bytes(b, dot_bytes(b, zero(), low, x[0]), high, x[1])
    lower = dot_bytes(b, dot_bytes(b, x[4], low, x[2]), high, x[3])
    total = b.add(b.shl(upper, splat(7, upper.type)), lower)
    return [(0, _floats(b, total), _scales(b, row.ready, at, left, FOURS))]


def _neighbours(b: Builder, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Two codes a byte that are neighbours: 64 bytes."""
    address = at_byte(b, row.codes, b.lshr(at, I64(1)))
    if left is None:
        return _halves(b, words_from(b, address, 16))
    return _halves(b, masked(b, address, 16, lanes_below(b, b.lshr(left, I64(3)))))


def _blocks(width: int, b: Builder, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """The 16 bytes that end each of four blocks of `width` bytes."""
    first = at_byte(b, row.codes, b.mul(b.lshr(at, I64(5)), I64(width)), width - 16)
    return _halves(
        b, joined(b, [_block(b, at_byte(b, first, width * i), 4, i, left) for i in range(4)])
    )


def _linear(read: Any, b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    return _together(b, row, at, read(b, row, at, left), x, left)


def _table(read: Any, b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    """e2m1 codes: twice their values plus 12."""
    values = [int(2 * v) for v in E2M1]
    table = constant([12 + v for v in values] * 1 + [12 - v for v in values], I8)
    table = joined(b, [table] * 4)
    codes = read(b, row, at, left)
    kind = table.type
    codes = [llvm_call(b, "llvm.x86.avx512.pshuf.b.512", kind, [table, code]) for code in codes]
    return _together(b, row, at, codes, x, left)


def _int8(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, total = at_byte(b, row.codes, at), zero()
    for i in range(2):
        total = dot_words(b, total, _signed(b, words_from(b, at_byte(b, first, 32 * i), 8)), x[i])
    return [(0, _floats(b, total), _scales(b, row.ready, at, left, ALL, 6))]


def _q8_0(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, terms = at_byte(b, row.codes, at, b.lshr(at, I64(4)), 2), []
    for i in range(2):
        codes = _signed(b, _block(b, at_byte(b, first, 34 * i), 8, i, left))
        scale = _scales(b, row.ready, at, left, [i] * 16)
        terms.append((0, _floats(b, dot_words(b, zero(), codes, x[i])), scale))
    return terms


def _signed(b: Builder, raw: Value) -> Value:
    return b.sext(b.bitcast(raw, vector_of(I8, 32)), vector_of(I16, 32))


def _super_block(b: Builder, row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """(the block of 256 inputs, which half of it)."""
    start = at_byte(b, row.codes, b.mul(b.lshr(at, I64(8)), I64(width)))
    return start, b.and_(b.lshr(at, I64(7)), I64(1))


def _q4_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 144)
    raw = words_from(b, at_byte(b, start, 16, b.shl(side, I64(6))), 16)
    return _with_minima(b, row, at, _halves(b, raw), x, left)


def _q5_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 176)
    four = _halves(b, words_from(b, at_byte(b, start, 48, b.shl(side, I64(6))), 16))
    fifth = b.bitcast(_twice(b, words_from(b, at_byte(b, start, 16), 8)), vector_of(I16, 32))
    # Bit 4 side + 2 (upper half of the vector) + which half of the codes goes to bit 4.
    fifth = b.lshr(fifth, broadcast(b, b.trunc(b.shl(side, I64(2)), I16), 32))
    codes = []
    for i, low in enumerate(four):
        moved = b.shl(fifth, constant([4 - i] * 16 + [2 - i] * 16, I16))
        bit = b.and_(b.bitcast(moved, low.type), splat(16, low.type))
        codes.append(b.or_(low, bit))
    return _with_minima(b, row, at, codes, x, left)


def _twice(b: Builder, half: Value) -> Value:
    return b.shuffle_vector(half, half, constant([*range(8)] * 2, I32))


def _with_minima(
    b: Builder, row: Row, at: Value, codes: Sequence[Value], x: list[Value], left: Left
) -> list[Term]:
    """q4_k and q5_k: groups 0 and 2 in one half of a turn, 1 and 3 in the other."""
    terms = []
    for i, code in enumerate(codes):
        scale = _scales(b, row.ready, at, left, [i] * 8 + [2 + i] * 8)
        terms.append((0, _floats(b, times(b, code, x, i, zero())), scale))
    sums = b.bitcast(x[4], vector_of(F32))
    return [*terms, (0, sums, _scales(b, row.minima, at, left, [0, 1, 2, 3] * 4))]


MINIMA = (0, 1, 10, 11)  # lanes in which packed x has the sums of four groups


def _q6_k(b: Builder, row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(b, row, at, 210)
    four = _halves(b, words_from(b, at_byte(b, start, b.shl(side, I64(6))), 16))
    two = b.bitcast(
        _twice(b, words_from(b, at_byte(b, start, 128, b.shl(side, I64(5))), 8)), I16X32
    )
    moved = (
        b.shl(two, constant([4] * 16 + [2] * 16, I16)),
        b.lshr(two, constant([0] * 16 + [2] * 16, I16)),
    )
    terms = []
    for i, (low, high) in enumerate(zip(four, moved, strict=True)):
        code = b.or_(low, b.and_(b.bitcast(high, low.type), splat(48, low.type)))
        scale = _scales(b, row.ready, at, left, FOURS, 4, 4 * i)
        terms.append((i, _floats(b, times(b, code, x, i, x[4 + i])), scale))
    return terms


I16X32 = vector_of(I16, 32)
_RUN = range(128)
NEIGHBOURS = (*_RUN[::2], *_RUN[1::2])


def _runs(length: int) -> tuple[int, ...]:
    """Runs of inputs take turns in the two halves."""
    return tuple(sorted(_RUN, key=lambda i: (i // length % 2, i)))


WHOLE: dict[str, Whole] = {
    "int8": Whole(_int8, shift=6, paired=False, alone=True),
    "q8_0": Whole(_q8_0, paired=False),
    "int4": Whole(partial(_linear, _neighbours), order=NEIGHBOURS, offset=8),
    "mxfp4": Whole(partial(_table, _neighbours), order=NEIGHBOURS, offset=12, factor=0.5),
    "q4_0": Whole(partial(_linear, partial(_blocks, 18)), order=_runs(16), offset=8),
    "gguf_mxfp4": Whole(partial(_table, partial(_blocks, 17)), order=_runs(16), offset=12),
    "q4_k": Whole(_q4_k, order=_runs(32), apart=True, minima=True),
    "q5_k": Whole(_q5_k, order=_runs(32), apart=True, minima=True),
    "q6_k": Whole(_q6_k, shift=4, order=_runs(64), offset=32, apart=True, paired=False),
}


def whole_of(encoding: Any) -> tuple[str, Whole]:
    name = NAMES[encoding.literal_value]
    return name, WHOLE[name]
