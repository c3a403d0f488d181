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
    LINE,
    IntegerProduct,
    joined,
    times,
    zero,
)
from greenroom.runtime.kernels.codegen.llvm.intrinsics import inline, outlined
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import F32, I8, I16, I32, Value, counted_loop


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


def _sums(form: IntegerProduct, groups: Sequence[tuple[Value, list[Value]]]) -> Value:
    """Sum the inputs that share a minimum, each sum in its lane of a vector."""
    integers = [(power, vector) for power, vectors in groups for vector in vectors]
    each = len(integers) // len(form.minima)  # vectors that share a minimum
    result = integers[0][1].constant(0.0, F32)
    for number, lane in enumerate(form.minima):
        power, first = integers[number * each]
        total = sum((vector for _, vector in integers[number * each + 1 :][: each - 1]), first)
        result = result.with_lane(lane, _reduced("add", total).convert(F32, signed=True) * power)
    return result


def packing_code(encoding: str, form: IntegerProduct):
    """Make the intrinsics that convert an input row to integers for one encoding's products.

    pack(x, K, out):    converts the float32 row x [K] and writes `packed_bytes` bytes to `out`
    powers_at(x, K):    returns the address of the scales of a packed row, which are powers of two
    """
    unit, group = form.unit, form.group

    @intrinsic
    def pack(typingctx, x, K, out):
        def emit(x, K, out):
            powers = powers_of(form, out, K)
            with counted_loop(0, (K + (unit - 1)) / unit) as number:
                groups = []
                for start in range(0, unit, group):
                    first = number * unit + start
                    mask = (first < K).broadcast()
                    place = x + (first << 2)
                    groups.append(
                        _group(
                            form,
                            [
                                (place + 4 * i).load(F32, LANES, mask)
                                for i in range(0, group, LANES)
                            ],
                        )
                    )
                    place = powers + ((first >> form.shift) << 2)
                    for i in range(group >> form.shift):
                        (place + 4 * i).store(groups[-1][0] * form.factor)
                planes = planes_of(form, [vector for _, vectors in groups for vector in vectors])
                if form.offset:
                    planes += _offsets(form, planes)
                if form.minima:
                    planes.append(_sums(form, groups))
                for i, plane in enumerate(planes):
                    (out + number * (LINE * form.vectors) + LINE * i).store(plane)

        return outlined(types.void(*[types.int64] * 3), f"pack.{encoding}", emit)

    @intrinsic
    def powers_at(typingctx, x, K):
        return inline(types.int64(types.int64, types.int64), lambda x, K: powers_of(form, x, K))

    return pack, powers_at
