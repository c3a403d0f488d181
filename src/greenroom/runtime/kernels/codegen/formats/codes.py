"""Integer products with quantised weights: LLVM code for iterations of 64 or 128 inputs.

Codes of two to eight bits are multiplied with input rows as int8 or int16 (packing.py) and summed
exactly, eight or four products to a lane. Then each lane's sum is multiplied by a scale in float32.
A code may be larger than its weight by an offset: the sum then begins with minus the offset times
the sum of the inputs.

Needs AVX-512 with VNNI (`INTEGERS`). The iterations of each encoding are in families/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from greenroom.runtime.kernels.codegen.formats.scales import Row
from greenroom.runtime.kernels.codegen.llvm.target import FEATURES, WIDE
from greenroom.runtime.kernels.codegen.llvm.values import F32, I8, I16, I32, Value

INTEGERS = WIDE and {f"avx512{name}" for name in ("bw", "dq", "vl", "vnni")} <= FEATURES
BLOCK = 64  # inputs of a partial sum where sums of blocks are requested
LINE = 64  # bytes of a vector

Left = Value | None  # inputs of the last iteration; None: a complete one
Term = tuple[int, Value, Value]  # block of the iteration, vector, factor of the vector
Codes = Callable[[Row, Value, Left], tuple[Value, Value]]  # of both halves of an iteration


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
    minima: the lane of packed inputs with the sum of each group of inputs that share a minimum
    paired: do the halves of a vector belong to two blocks of 64 inputs?
    row_by_row: are rows read one after another on processors for which that is faster?
    """

    terms: Callable[[Row, Value, list[Value], Left], list[Term]]
    shift: int = 5
    order: tuple[int, ...] = ()
    offset: int = 0
    factor: float = 1.0
    separate_halves: bool = False
    minima: tuple[int, ...] = ()
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
        return 4 + (1 + self.separate_halves if self.offset else 0) + bool(self.minima)

    def packed_bytes(self, inputs: int) -> int:
        """Return the size in bytes of an input row of `inputs` numbers, packed as integers."""
        units = -(-inputs // self.unit)
        return LINE * (units * self.vectors + 1) + 4 * units * (self.unit >> self.shift)


# Orders of an iteration's inputs.

_RUN = range(128)
NEIGHBOURS = (*_RUN[::2], *_RUN[1::2])


def runs(length: int) -> tuple[int, ...]:
    """Order in which runs of `length` inputs alternate between the two halves."""
    return tuple(sorted(_RUN, key=lambda i: (i // length % 2, i)))


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


def floats(value: Value) -> Value:
    """Convert sums of products to float32."""
    return value.convert(F32, signed=True)


def joined(parts: Sequence[Value]) -> Value:
    """Concatenate LLVM vectors of equal length."""
    while len(parts) > 1:
        picks = range(2 * parts[0].lanes)
        parts = [u.shuffle(picks, v) for u, v in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def split_bytes(raw: Value) -> tuple[Value, Value]:
    """Split bytes into their lower and their upper four bits."""
    return raw.bitcast(I8) & 15, (raw.bitcast(I16) >> 4).bitcast(I8) & 15


def signed_codes(raw: Value) -> Value:
    """Convert bytes with a sign to int16."""
    return raw.bitcast(I8).convert(I16, signed=True)


def group_scales(
    base: Value, at: Value, left: Left, lanes: Sequence[int], shift: int = 5, first: int = 0
) -> Value:
    """Load the prepared scales, or minima, of an iteration's groups.

    Lane i has that of group first + lanes[i], where lanes[i] is less than 8. The scale is 0 if the
    row has no such group: codes and x are 0 there too, but uninitialised memory may hold NaN, and 0
    times NaN is NaN.
    """
    place = base + ((at >> shift) << 2) + 4 * first
    if left is None and len(set(lanes)) == 1:
        return (place + 4 * lanes[0]).load(F32).broadcast()
    count = 4 if max(lanes) < 4 else 8
    mask = None if left is None else ((left >> shift) - first).below(count)
    return place.load(I32, count, mask).bitcast(F32).shuffle(lanes)


ALL, FOURS, PAIRS = (0,) * 16, tuple(i // 4 for i in range(16)), tuple(i // 2 for i in range(16))
MINIMA = (0, 1, 10, 11)  # lanes with the sums of four groups, two for each block of 64 inputs


# Products.


def times(codes: Value, x: list[Value], side: int, start: Value) -> Value:
    """Multiply quantised codes with one half of an iteration's integer inputs."""
    return (dot_int8(zero(codes), codes, x[side]) << 7) + dot_int8(start, codes, x[2 + side])


def _joint_terms(
    read: Codes,
    table: Sequence[int],
    extra: str,
    shift: int,
    row: Row,
    at: Value,
    x: list[Value],
    left: Left,
) -> list[Term]:
    """Multiply both halves of an iteration into one vector of sums.

    Four lanes belong to a group of 32 inputs, or two to one of 16: of 2^shift. Codes are the result
    of `read`, or the values that `table` has for them. The packed inputs have an `extra` vector for
    an "offset", for "minima" or for nothing.
    """
    low, high = read(row, at, left)
    if table:
        name, values = "llvm.x86.avx512.pshuf.b.512", low.constant([*table] * 4)
        low, high = (values.call(name, values.ir.type, code) for code in (low, high))
    upper = dot_int8(dot_int8(zero(at), low, x[0]), high, x[1])
    start = x[4] if extra == "offset" else zero(at)
    lower = dot_int8(dot_int8(start, low, x[2]), high, x[3])
    scales = group_scales(row.ready, at, left, FOURS if shift == 5 else PAIRS, shift)
    terms = [(0, floats((upper << 7) + lower), scales)]
    if extra == "minima":
        terms.append(minimum_term(row, at, x, left))
    return terms


def minimum_term(row: Row, at: Value, x: list[Value], left: Left) -> Term:
    """Multiply the sums of an iteration's groups of 32 inputs, in lanes MINIMA, with minima."""
    return 0, x[4].bitcast(F32), group_scales(row.minima, at, left, (0, 1, 2, 3) * 4)


def joint_product(
    read: Codes,
    order: tuple[int, ...],
    offset: int = 0,
    table: Sequence[int] = (),
    factor: float = 1.0,
    minima: tuple[int, ...] = (),
    shift: int = 5,
) -> IntegerProduct:
    """Make the integer product of an encoding with a scale for 32 weights, or 16.

    read:  function that loads the codes of an iteration, in `order`
    table: the values of 4-bit codes, signed; empty: a code is its own value
    shift: a row has one scale for 2^shift weights
    """
    offset -= min(table, default=0)
    extra = "offset" if offset else "minima" if minima else ""
    terms = partial(_joint_terms, read, tuple(value + offset for value in table), extra, shift)
    return IntegerProduct(
        terms, shift=shift, order=order, offset=offset, factor=factor, minima=minima
    )
