"""A row of x as integers, as the products of integer.py take it.

32 neighbours (64 where they share a scale) share a power of two, such that the largest has 15 bits
beside its sign and goes into two bytes, of seven bits and of eight with the sign; or 16 bits, in a
word. The bytes lie in the order of the codes that they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from greenroom.runtime.kernels.codegen.formats.codes import (
    LINE,
    MINIMA,
    WHOLE,
    Whole,
    joined,
    masked,
    times,
    whole_of,
    zero,
)
from greenroom.runtime.kernels.codegen.formats.row import (
    Builder,
    Value,
    at_byte,
    constant,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    broadcast,
    fma,
    llvm_call,
    outlined,
    splat,
    store,
    vector_of,
)


def room(encoding: str, inputs: int) -> int:
    """Bytes of a packed row of x."""
    whole = WHOLE[encoding]
    units = -(-inputs // whole.unit)
    return LINE * (units * whole.vectors + 1) + 4 * units * (whole.unit >> whole.shift)


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


def planes_of(b: Builder, whole: Whole, integers: Sequence[Value]) -> list[Value]:
    """A turn's integers as vectors of 64 bytes."""
    if not whole.order:
        words = [b.trunc(v, vector_of(I16)) for v in integers]
        return [joined(b, words[:2]), joined(b, words[2:])]
    seven = splat(7, vector_of(I32))
    upper = [b.trunc(b.ashr(v, seven), vector_of(I8)) for v in integers]
    lower = [b.trunc(b.and_(v, splat(127, v.type)), vector_of(I8)) for v in integers]
    planes = []
    for plane in (joined(b, upper), joined(b, lower)):
        for half in (whole.order[:LINE], whole.order[LINE:]):
            planes.append(b.shuffle_vector(plane, plane, constant(list(half), I32)))
    return planes


def _offsets(b: Builder, whole: Whole, planes: list[Value]) -> list[Value]:
    """What sums of codes begin with: -offset times the sum of a lane's x."""
    ones = splat(1, vector_of(I8, LINE))
    sides = [times(b, ones, planes, side, zero()) for side in range(2)]
    sums = sides if whole.apart else [b.add(*sides)]
    return [b.mul(v, splat(-whole.offset, v.type)) for v in sums]


def powers_of(b: Builder, whole: Whole, x: Value, K: Value) -> Value:
    units = b.udiv(b.add(K, I64(whole.unit - 1)), I64(whole.unit))
    return b.add(x, b.mul(units, I64(LINE * whole.vectors)))


@intrinsic(prefer_literal=True)
def pack(typingctx, encoding, x, K, out):
    """Turn x [K] (float32) into integers for a matrix of an encoding; `room` bytes."""
    name, whole = whole_of(encoding)
    unit, group = whole.unit, whole.group

    def emit(b, sig, args):
        x, K, out = args
        units = b.udiv(b.add(K, I64(unit - 1)), I64(unit))
        powers = powers_of(b, whole, out, K)

        def turn(number):
            at = b.mul(number, I64(unit))
            integers, sums = [], []
            for start in range(0, unit, group):
                here = b.add(at, I64(start))
                there = b.icmp_signed("<", here, K)
                mask = broadcast(b, there, LANES)
                vectors = [
                    b.bitcast(
                        masked(b, at_byte(b, x, b.shl(here, I64(2)), 4 * i), 16, mask),
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
            planes = planes_of(b, whole, integers)
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


@intrinsic(prefer_literal=True)
def powers_at(typingctx, encoding, x, K):
    """Address of the powers of two in packed x."""
    _, whole = whole_of(encoding)

    def emit(context, b, sig, args):
        return powers_of(b, whole, *args[1:])

    return types.int64(encoding, types.int64, types.int64), emit
