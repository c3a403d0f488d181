"""A row of x as integers, as the products of codes.py take it.

32 neighbours (64 where they share a scale) share a power of two, such that the largest has 15 bits
beside its sign and goes into two bytes, of seven bits and of eight with the sign; or 16 bits, in a
word. The bytes lie in the order of the codes that they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba import types
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.formats.codes import (
    LINE,
    MINIMA,
    WHOLE,
    Whole,
    joined,
    times,
    whole_of,
    zero,
)
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.codegen.llvm.values import (
    F32,
    I8,
    I16,
    I32,
    Value,
    counted,
    inline,
    outlined,
)


def room(encoding: str, inputs: int) -> int:
    """Bytes of a packed row of x."""
    whole = WHOLE[encoding]
    units = -(-inputs // whole.unit)
    return LINE * (units * whole.vectors + 1) + 4 * units * (whole.unit >> whole.shift)


def _reduced(name: str, value: Value) -> Value:
    return value.call(f"llvm.vector.reduce.{name}.v{LANES}i32", I32)


def _group(whole: Whole, vectors: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Neighbours as integers times a power of two, which is NaN where one of them is no number."""
    top = 13 if whole.order else 14
    largest = zero(vectors[0])
    for v in vectors:
        largest = largest.at_least(v.bits(I32) & 0x7FFFFFFF)
    exponent = _reduced("umax", largest) >> 23
    bounded = exponent.at_least(40)
    power = exponent.constant(0x7FC00000).where(exponent.equals(255), (bounded - top) << 23)
    inverse = ((254 + top - bounded) << 23).bits(F32).wide()
    # Rounded to the nearest by adding 1.5 * 2^23.
    moved = (v.fma(inverse, v.constant(12582912.0)).bits(I32) for v in vectors)
    return power.bits(F32), [(m - 0x4B400000).at_most((2 << top) - 1) for m in moved]


def planes_of(whole: Whole, integers: Sequence[Value]) -> list[Value]:
    """A turn's integers as vectors of 64 bytes."""
    if not whole.order:
        words = [v.to(I16) for v in integers]
        return [joined(words[:2]), joined(words[2:])]
    upper = joined([v.shifted_signed(7).to(I8) for v in integers])
    lower = joined([(v & 127).to(I8) for v in integers])
    halves = whole.order[:LINE], whole.order[LINE:]
    return [plane.pick(half) for plane in (upper, lower) for half in halves]


def _offsets(whole: Whole, planes: list[Value]) -> list[Value]:
    """What sums of codes begin with: -offset times the sum of a lane's x."""
    ones = planes[0].constant(1)
    sides = [times(ones, planes, side, zero(ones)) for side in range(2)]
    sums = sides if whole.apart else [sides[0] + sides[1]]
    return [v * -whole.offset for v in sums]


def powers_of(whole: Whole, x: Value, K: Value) -> Value:
    return x + (K + (whole.unit - 1)) / whole.unit * (LINE * whole.vectors)


@intrinsic(prefer_literal=True)
def pack(typingctx, encoding, x, K, out):
    """Turn x [K] (float32) into integers for a matrix of an encoding; `room` bytes."""
    name, whole = whole_of(encoding)
    unit, group = whole.unit, whole.group

    def emit(x, K, out):
        powers = powers_of(whole, out, K)
        with counted(0, (K + (unit - 1)) / unit) as number:
            integers, sums = [], []
            for start in range(0, unit, group):
                here = number * unit + start
                mask = (here < K).wide()
                place = x + (here << 2)
                vectors = [(place + 4 * i).load(F32, LANES, mask) for i in range(0, group, LANES)]
                power, found = _group(whole, vectors)
                integers += found
                place = powers + ((here >> whole.shift) << 2)
                for i in range(group >> whole.shift):
                    (place + 4 * i).store(power * whole.factor)
                if whole.minima:
                    sums.append(_reduced("add", found[0] + found[1]).to(F32, signed=True) * power)
            planes = planes_of(whole, integers)
            if whole.offset:
                planes += _offsets(whole, planes)
            if whole.minima:
                vector = x.constant([0.0] * LANES, F32)
                for value, lane in zip(sums, MINIMA, strict=True):
                    vector = vector.with_lane(lane, value)
                planes.append(vector)
            for i, plane in enumerate(planes):
                (out + number * (LINE * whole.vectors) + LINE * i).store(plane)

    return outlined(types.void(encoding, *[types.int64] * 3), f"pack.{name}", emit)


@intrinsic(prefer_literal=True)
def powers_at(typingctx, encoding, x, K):
    """Address of the powers of two in packed x."""
    _, whole = whole_of(encoding)
    signature = types.int64(encoding, types.int64, types.int64)
    return inline(signature, lambda _, x, K: powers_of(whole, x, K))
