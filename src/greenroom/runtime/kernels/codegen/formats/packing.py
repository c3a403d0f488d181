"""Conversion of an input row to integers, for products with quantised weights (codes.py).

Each 32 neighbouring inputs (64 if their weights share a scale) are divided by a common power of
two, so that the largest becomes an integer of 15 bits with its sign, stored as two bytes (its lower
7 bits and its upper 8), or of 16 bits, stored as int16. The bytes are in the order of the codes
that they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.formats.codes import (
    INTEGER_PRODUCTS,
    LINE,
    MINIMA,
    IntegerProduct,
    integer_product,
    joined,
    times,
    zero,
)
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    I8,
    I16,
    I32,
    Value,
    counted_loop,
    inline,
    outlined,
)


def packed_bytes(encoding: str, inputs: int) -> int:
    """Return the size in bytes of an input row of `inputs` numbers, packed as integers."""
    form = INTEGER_PRODUCTS[encoding]
    units = -(-inputs // form.unit)
    return LINE * (units * form.vectors + 1) + 4 * units * (form.unit >> form.shift)


def _reduced(name: str, value: Value) -> Value:
    return value.call(f"llvm.vector.reduce.{name}.v{LANES}i32", I32)


def _group(form: IntegerProduct, vectors: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Convert neighbours to (power of two, integers); NaN if one is NaN or infinite."""
    top = 13 if form.order else 14
    largest = zero(vectors[0])
    for v in vectors:
        largest = largest.at_least(v.bitcast(I32) & 0x7FFFFFFF)
    exponent = _reduced("umax", largest) >> 23
    bounded = exponent.at_least(40)
    power = exponent.constant(0x7FC00000).where(exponent.equals(255), (bounded - top) << 23)
    inverse = ((254 + top - bounded) << 23).bitcast(F32).broadcast()
    # Rounded to the nearest by adding 1.5 * 2^23.
    moved = (v.fma(inverse, v.constant(12582912.0)).bitcast(I32) for v in vectors)
    return power.bitcast(F32), [(m - 0x4B400000).at_most((2 << top) - 1) for m in moved]


def planes_of(form: IntegerProduct, integers: Sequence[Value]) -> list[Value]:
    """Convert the integers of one iteration's inputs to vectors of 64 bytes."""
    if not form.order:
        int16 = [v.convert(I16) for v in integers]
        return [joined(int16[:2]), joined(int16[2:])]
    upper = joined([v.shifted_signed(7).convert(I8) for v in integers])
    lower = joined([(v & 127).convert(I8) for v in integers])
    halves = form.order[:LINE], form.order[LINE:]
    return [plane.shuffle(half) for plane in (upper, lower) for half in halves]


def _offsets(form: IntegerProduct, planes: list[Value]) -> list[Value]:
    """First values of sums of codes: -offset times the sum of a lane's x."""
    ones = planes[0].constant(1)
    sides = [times(ones, planes, side, zero(ones)) for side in range(2)]
    sums = sides if form.separate_halves else [sides[0] + sides[1]]
    return [v * -form.offset for v in sums]


def powers_of(form: IntegerProduct, x: Value, K: Value) -> Value:
    """Return the address of a packed input row's scales, which are powers of two."""
    return x + (K + (form.unit - 1)) / form.unit * (LINE * form.vectors)


@intrinsic(prefer_literal=True)
def pack(typingctx, encoding, x, K, out):
    """Convert a float32 input row to integers for products with one encoding.

    The row x [K] is written as `packed_bytes` bytes to the address `out`.
    """
    name, form = integer_product(encoding)
    unit, group = form.unit, form.group

    def emit(x, K, out):
        powers = powers_of(form, out, K)
        with counted_loop(0, (K + (unit - 1)) / unit) as number:
            integers, sums = [], []
            for start in range(0, unit, group):
                first = number * unit + start
                mask = (first < K).broadcast()
                place = x + (first << 2)
                vectors = [(place + 4 * i).load(F32, LANES, mask) for i in range(0, group, LANES)]
                power, group_integers = _group(form, vectors)
                integers += group_integers
                place = powers + ((first >> form.shift) << 2)
                for i in range(group >> form.shift):
                    (place + 4 * i).store(power * form.factor)
                if form.minima:
                    total = _reduced("add", group_integers[0] + group_integers[1])
                    sums.append(total.convert(F32, signed=True) * power)
            planes = planes_of(form, integers)
            if form.offset:
                planes += _offsets(form, planes)
            if form.minima:
                vector = x.constant([0.0] * LANES, F32)
                for value, lane in zip(sums, MINIMA, strict=True):
                    vector = vector.with_lane(lane, value)
                planes.append(vector)
            for i, plane in enumerate(planes):
                (out + number * (LINE * form.vectors) + LINE * i).store(plane)

    return outlined(types.void(encoding, *[types.int64] * 3), f"pack.{name}", emit)


@intrinsic(prefer_literal=True)
def powers_at(typingctx, encoding, x, K):
    """Return the address of a packed input row's scales, which are powers of two."""
    _, form = integer_product(encoding)
    signature = types.int64(encoding, types.int64, types.int64)
    return inline(signature, lambda _, x, K: powers_of(form, x, K))
