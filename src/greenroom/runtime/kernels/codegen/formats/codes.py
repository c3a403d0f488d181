"""Integer products with quantised weights: LLVM code for iterations of 64 or 128 inputs.

`INTEGER_PRODUCTS` has the encodings. Codes of four to eight bits are multiplied with input rows as
int8 or int16 (packing.py) and summed exactly, eight or four products to a lane. Then each lane's
sum is multiplied by a scale in float32. A code may be larger than its weight by an offset: the sum
then begins with minus the offset times the sum of the inputs.

Needs AVX-512 with VNNI (`INTEGERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.runtime.kernels.codegen.formats.expand import E2M1, NAMES
from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import FEATURES, WIDE
from greenroom.runtime.kernels.codegen.llvm.values import F32, I1, I8, I16, I32, Value

INTEGERS = WIDE and {f"avx512{name}" for name in ("bw", "dq", "vl", "vnni")} <= FEATURES
BLOCK = 64  # inputs of a partial sum where sums of blocks are requested
LINE = 64  # bytes of a vector

Left = Value | None  # inputs of the last iteration; None: a complete one
Term = tuple[int, Value, Value]  # block of the iteration, vector, factor of the vector


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """LLVM code that multiplies one encoding's quantised weights with inputs as integers.

    One iteration of its loop takes `unit` inputs of a row.

    terms:  function of (row, index of the iteration's first input, vectors of the packed inputs,
            number of inputs left; None: a complete iteration) that returns terms of the sums
    shift:  a row has one float32 scale for 2^shift inputs
    order:  the iteration's inputs in the order of the codes' bytes, if inputs are stored as two
            int8; empty if inputs are int16
    offset, factor: a weight is scale * factor * (code - offset), minus its minimum if there is one
    separate_halves: are the first and the last half of `order` summed separately?
    minima: has the encoding minima, one for 32 inputs?
    paired: do the halves of a vector belong to two blocks of 64 inputs?
    row_by_row: are rows read one after another on processors for which that is faster?
    """

    terms: Callable[[Row, Value, list[Value], Left], list[Term]]
    shift: int = 5
    order: tuple[int, ...] = ()
    offset: int = 0
    factor: float = 1.0
    separate_halves: bool = False
    minima: bool = False
    paired: bool = True
    row_by_row: bool = False

    @property
    def unit(self) -> int:
        """Return the number of inputs of a row that one iteration multiplies."""
        return len(self.order) or BLOCK

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale, which is a power of two."""
        return max(32, 1 << self.shift)

    @property
    def vectors(self) -> int:
        """Return the number of vectors of packed inputs that one iteration reads.

        int16 inputs take two vectors. Inputs as two int8 take four, and further vectors of sums
        if the encoding has an offset or minima.
        """
        if not self.order:
            return 2
        return 4 + (1 + self.separate_halves if self.offset else 0) + self.minima


# Instructions.


def _dot(name: str, total: Value, codes: Value, x: Value) -> Value:
    """Add products of small integers to lanes of 32 bits."""
    full, kind = f"llvm.x86.avx512.{name}.512", total.ir.type
    return total.call(full, kind, codes.bitcast(I32), x.bitcast(I32))


dot_int8 = partial(_dot, "vpdpbusd")  # codes without, x with a sign
dot_int16 = partial(_dot, "vpdpwssd")


def zero(value: Value) -> Value:
    """Make a vector of 16 int32 zeros."""
    return value.constant([0] * 16, I32)


def _floats(value: Value) -> Value:
    return value.convert(F32, signed=True)


def _block(address: Value, lanes: int, number: int, left: Left) -> Value:
    """Load the codes of block `number` of 32 inputs of an iteration; 0 if the row lacks it."""
    mask = None if left is None or number == 0 else (left > 32 * number).broadcast(lanes)
    return address.load(I32, lanes, mask)


def joined(parts: Sequence[Value]) -> Value:
    """Concatenate LLVM vectors of equal length."""
    while len(parts) > 1:
        picks = range(2 * parts[0].lanes)
        parts = [u.shuffle(picks, v) for u, v in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _halves(raw: Value) -> tuple[Value, Value]:
    """Split bytes into their lower and their upper four bits."""
    return raw.bitcast(I8) & 15, (raw.bitcast(I16) >> 4).bitcast(I8) & 15


def _scales(
    base: Value, at: Value, left: Left, lanes: Sequence[int], shift: int = 5, first: int = 0
) -> Value:
    """Load for lane i the prepared scale, or minimum, of group first + lanes[i] of an iteration.

    lanes[i] is less than 4. The scale is 0 if the row has no such group: codes and x are 0 there
    too, but uninitialised memory may hold NaN, and 0 times NaN is NaN.
    """
    place = base + ((at >> shift) << 2) + 4 * first
    if left is None and len(set(lanes)) == 1:
        return (place + 4 * lanes[0]).load(F32).broadcast()
    mask = None if left is None else ((left >> shift) - first).below(4)
    return place.load(I32, 4, mask).bitcast(F32).shuffle(lanes)


ALL, FOURS = (0,) * 16, tuple(i // 4 for i in range(16))


# Iterations.


def times(codes: Value, x: list[Value], side: int, start: Value) -> Value:
    """Multiply quantised codes with one half of an iteration's integer inputs."""
    return (dot_int8(zero(codes), codes, x[side]) << 7) + dot_int8(start, codes, x[2 + side])


def _joint_terms(
    read: Any, table: Sequence[int], row: Row, at: Value, x: list[Value], left: Left
) -> list[Term]:
    """Multiply both halves of an iteration into one vector of sums, four lanes to a group.

    Codes are the result of `read`, or the values that `table` has for them.
    """
    low, high = read(row, at, left)
    if table:
        name, values = "llvm.x86.avx512.pshuf.b.512", low.constant([*table] * 4)
        low, high = (values.call(name, values.ir.type, code) for code in (low, high))
    upper = dot_int8(dot_int8(zero(at), low, x[0]), high, x[1])
    lower = dot_int8(dot_int8(x[4], low, x[2]), high, x[3])
    return [(0, _floats((upper << 7) + lower), _scales(row.ready, at, left, FOURS))]


def _neighbours(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load 64 bytes, each with the codes of two neighbours."""
    mask = None if left is None else (left >> 3).below(16)
    return _halves((row.codes + (at >> 1)).load(I32, 16, mask))


def _blocks(width: int, row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load the last 16 bytes of each of four blocks of `width` bytes."""
    first = row.codes + (at >> 5) * width + (width - 16)
    return _halves(joined([_block(first + width * i, 4, i, left) for i in range(4)]))


def _blocks_of_five(row: Row, at: Value, left: Left) -> tuple[Value, Value]:
    """Load q5_0: as `_blocks`, with 32 bits before them, bit i the fifth bit of code i."""
    first = row.codes + (at >> 5) * 22 + 2
    fifth_bits = joined([_block(first + 22 * i, 1, i, left) for i in range(4)])
    low, high = (
        four | four.constant(16).where((fifth_bits >> shift).convert(I16).bitcast(I1), 0)
        for four, shift in zip(_blocks(22, row, at, left), (0, 16), strict=True)
    )
    return low, high


def _int8(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, total = row.codes + at, zero(at)
    for i in range(2):
        total = dot_int16(total, _signed((first + 32 * i).load(I32, 8)), x[i])
    return [(0, _floats(total), _scales(row.ready, at, left, ALL, 6))]


def _q8_0(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    first, terms = row.codes + at + (at >> 4) + 2, []
    for i in range(2):
        codes = _signed(_block(first + 34 * i, 8, i, left))
        scale = _scales(row.ready, at, left, [i] * 16)
        terms.append((0, _floats(dot_int16(zero(at), codes, x[i])), scale))
    return terms


def _signed(raw: Value) -> Value:
    return raw.bitcast(I8).convert(I16, signed=True)


def _super_block(row: Row, at: Value, width: int) -> tuple[Value, Value]:
    """Return (address of the block of 256 inputs, which half of it)."""
    return row.codes + (at >> 8) * width, (at >> 7) & 1


def _twice(half: Value) -> Value:
    """Repeat eight int32 in both halves of a vector of int16."""
    return half.shuffle([*range(8)] * 2).bitcast(I16)


def _q4_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 144)
    return _with_minima(row, at, _halves((start + 16 + (side << 6)).load(I32, 16)), x, left)


def _q5_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 176)
    four = _halves((start + 48 + (side << 6)).load(I32, 16))
    # Bit 4 side + 2 (upper half of the vector) + which half of the codes goes to bit 4.
    fifth = _twice((start + 16).load(I32, 8)) >> (side << 2).convert(I16)
    codes = [
        low | ((fifth << ([4 - i] * 16 + [2 - i] * 16)).bitcast(I8) & 16)
        for i, low in enumerate(four)
    ]
    return _with_minima(row, at, codes, x, left)


def _with_minima(
    row: Row, at: Value, codes: Sequence[Value], x: list[Value], left: Left
) -> list[Term]:
    """Terms of q4_k and q5_k: groups 0 and 2 in one half of an iteration, 1 and 3 in the other."""
    terms = []
    for i, code in enumerate(codes):
        scale = _scales(row.ready, at, left, [i] * 8 + [2 + i] * 8)
        terms.append((0, _floats(times(code, x, i, zero(at))), scale))
    return [*terms, (0, x[4].bitcast(F32), _scales(row.minima, at, left, [0, 1, 2, 3] * 4))]


MINIMA = (0, 1, 10, 11)  # lanes of packed x with the sums of four groups


def _q6_k(row: Row, at: Value, x: list[Value], left: Left) -> list[Term]:
    start, side = _super_block(row, at, 210)
    four = _halves((start + (side << 6)).load(I32, 16))
    two = _twice((start + 128 + (side << 5)).load(I32, 8))
    moved = two << ([4] * 16 + [2] * 16), two >> ([0] * 16 + [2] * 16)
    terms = []
    for i, (low, high) in enumerate(zip(four, moved, strict=True)):
        code = low | (high.bitcast(I8) & 48)
        scale = _scales(row.ready, at, left, FOURS, 4, 4 * i)
        terms.append((i, _floats(times(code, x, i, x[4 + i])), scale))
    return terms


_RUN = range(128)
NEIGHBOURS = (*_RUN[::2], *_RUN[1::2])
# e2m1 codes as twice their values plus 12.
_E2M1 = tuple(12 + sign * int(2 * value) for sign in (1, -1) for value in E2M1)


def _runs(length: int) -> tuple[int, ...]:
    """Order in which runs of `length` inputs alternate between the two halves."""
    return tuple(sorted(_RUN, key=lambda i: (i // length % 2, i)))


def _four_bits(read: Any, table: Sequence[int] = ()) -> Any:
    return partial(_joint_terms, read, table)


INTEGER_PRODUCTS: dict[str, IntegerProduct] = {
    "int8": IntegerProduct(_int8, shift=6, paired=False, row_by_row=True),
    "q8_0": IntegerProduct(_q8_0, paired=False),
    "int4": IntegerProduct(_four_bits(_neighbours), order=NEIGHBOURS, offset=8),
    "mxfp4": IntegerProduct(
        _four_bits(_neighbours, _E2M1), order=NEIGHBOURS, offset=12, factor=0.5
    ),
    "q4_0": IntegerProduct(_four_bits(partial(_blocks, 18)), order=_runs(16), offset=8),
    "q5_0": IntegerProduct(partial(_joint_terms, _blocks_of_five, ()), order=_runs(16), offset=16),
    "gguf_mxfp4": IntegerProduct(
        _four_bits(partial(_blocks, 17), _E2M1), order=_runs(16), offset=12
    ),
    "q4_k": IntegerProduct(_q4_k, order=_runs(32), separate_halves=True, minima=True),
    "q5_k": IntegerProduct(_q5_k, order=_runs(32), separate_halves=True, minima=True),
    "q6_k": IntegerProduct(
        _q6_k, shift=4, order=_runs(64), offset=32, separate_halves=True, paired=False
    ),
}


def integer_product(encoding: Any) -> tuple[str, IntegerProduct]:
    """Return (name, IntegerProduct) of an encoding that is given by its number."""
    name = NAMES[encoding.literal_value]
    return name, INTEGER_PRODUCTS[name]
