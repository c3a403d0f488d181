"""The scales of a row of each encoding: LLVM code that writes them as float32, side by side.

A `prepare(b, row)` writes scales to `row.ready` and minima to `row.minima`. It costs little there
and much beside the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from greenroom.runtime.kernels.codegen.formats.row import (
    BF16_KIND,
    F16_KIND,
    F32_KIND,
    NATURAL,
    Builder,
    Row,
    Value,
    at_byte,
    bytes_at,
    constant,
    half_at,
    put_scalar,
    scalar,
)
from greenroom.runtime.kernels.codegen.llvm.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    SIZE,
    broadcast,
    lanes_below,
    llvm_call,
    load,
    splat,
    store,
    vector_of,
    widen,
)


def nothing(b: Builder, row: Row) -> None:
    """There are no scales."""


def each(b: Builder, count: Value, step: Value | int = 1) -> Any:
    step = I64(step) if isinstance(step, int) else step
    return cgutils.for_range_slice(b, I64(0), count, step, I64)


def in_vectors(
    b: Builder, row: Row, count: Value, value: Callable[[Value, Value | None], Value]
) -> None:
    """Prepare scales value(at, left), at .. at + LANES of `count`, of which `left` exist or all.

    The last LANES overlap with those before; only where there are fewer do some not exist. Stores
    are whole there too, since a load soon after a masked one waits for it.
    """

    def put(at: Value, left: Value | None) -> None:
        scales = row.scaled(b, value(at, left), at, left)
        store(b, scales, at_byte(b, row.ready, b.shl(at, I64(2))))

    left = b.and_(count, I64(LANES - 1))
    with b.if_else(b.icmp_signed(">=", count, I64(LANES))) as (many, few):
        with many:
            with each(b, b.sub(count, left), LANES) as (at, _):
                put(at, None)
            with b.if_then(b.icmp_signed(">", left, I64(0))):
                put(b.sub(count, I64(LANES)), None)
        with few:
            put(I64(0), count)


def contiguous(shift: int, widened: Callable[[Builder, Value, Value, Value | None], Value]) -> Any:
    """Scales that lie side by side, one for 2^shift inputs."""

    def prepare(b: Builder, row: Row) -> None:
        count = b.lshr(b.add(row.inputs, I64((1 << shift) - 1)), I64(shift))

        def value(at: Value, left: Value | None) -> Value:
            return widened(b, row.scale, at, None if left is None else lanes_below(b, left))

        in_vectors(b, row, count, value)

    return prepare


def halves(b: Builder, base: Value, at: Value, mask: Value | None) -> Value:
    return load(b, F16_KIND, at_byte(b, base, b.shl(at, I64(1))), mask)


def powers(b: Builder, base: Value, at: Value, mask: Value | None) -> Value:
    """e8m0: 2^(e - 127), and 255 for NaN."""
    source, name = vector_of(I8), f"llvm.masked.load.v{LANES}i8.p0"
    pointer = b.inttoptr(b.add(base, at), source.as_pointer())
    if mask is None:
        raw = b.load(pointer, align=1)
    else:
        raw = llvm_call(b, name, source, [pointer, I32(1), mask, ir.Constant(source, None)])
    e = b.zext(raw, vector_of(I32))
    bits = b.shl(e, splat(23, e.type))
    bits = b.select(b.icmp_unsigned("==", e, splat(0, e.type)), splat(1 << 22, e.type), bits)
    bits = b.select(b.icmp_unsigned("==", e, splat(255, e.type)), splat(0x7FC00000, e.type), bits)
    return b.bitcast(bits, vector_of(F32))


def shared(kind: Any, factor: float = 1.0) -> Any:
    """Scales of a kind, each for `row.share` groups: repeated, so that every group has its own.

    They are multiplied by `factor`, a power of two.
    """

    def prepare(b: Builder, row: Row) -> None:
        groups = b.lshr(row.inputs, I64(5))
        column = cgutils.alloca_once_value(b, row.scale)
        element = {F16_KIND: I16, BF16_KIND: I16, F32_KIND: F32}[kind]
        with each(b, groups, row.share) as (start, _):
            address = b.load(column)
            b.store(b.add(address, I64(SIZE[kind])), column)
            raw = b.load(b.inttoptr(address, element.as_pointer()), align=SIZE[kind])
            value = b.fmul(widen(b, kind, raw), ir.Constant(F32, factor))
            stop = b.add(start, row.share)
            stop = b.select(b.icmp_signed("<", stop, groups), stop, groups)
            with cgutils.for_range_slice(b, start, stop, I64(1), I64) as (at, _):
                put_scalar(b, value, at_byte(b, row.ready, b.shl(at, I64(2))))

    return prepare


def inside(width: int, element: Any, read: Callable[[Builder, Value], Value]) -> Any:
    """Scales that begin blocks of 32 inputs and `width` bytes: LANES elements -> float32."""
    picked = _picked if LANES == 16 and element == I16 else apart

    def prepare(b: Builder, row: Row) -> None:
        def value(at: Value, left: Value | None) -> Value:
            first = at_byte(b, row.codes, b.mul(at, I64(width)))
            if left is None:
                return read(b, picked(b, first, width, element, None))
            return read(b, apart(b, first, width, element, left))

        in_vectors(b, row, b.lshr(row.inputs, I64(5)), value)

    return prepare


def _picked(b: Builder, address: Value, width: int, element: Any, left: None) -> Value:
    """As `apart`, of words that all exist: picked out of pairs of whole vectors."""
    words, kind = width // 2, vector_of(element, 32)
    count = 63 // words + 1  # of a pair of vectors
    count = 1 << (count.bit_length() - 1)
    found = ir.Constant(kind, ir.Undefined)
    for start in range(0, LANES, count):
        mine = range(start, start + count)
        first = at_byte(b, address, start * width)
        pair = [
            b.load(b.inttoptr(at_byte(b, first, 64 * i), kind.as_pointer()), align=1)
            for i in range(2)
        ]
        picks = [words * (i - start) if i in mine else i for i in range(32)]
        some = b.shuffle_vector(*pair, constant(picks, I32))
        kept = [32 + i if i in mine else i for i in range(32)]
        found = b.shuffle_vector(found, some, constant(kept, I32)) if start else some
    return b.shuffle_vector(found, found, constant(NATURAL, I32))


def apart(b: Builder, address: Value, width: int, element: Any, left: Value | None) -> Value:
    """LANES elements that begin `width` bytes apart; the last that exists stands for those beyond.

    One by one: gathering them takes several times as long on processors that guard gathers.
    """
    found = ir.Constant(vector_of(element), ir.Undefined)
    last = None if left is None else b.sub(left, I64(1))
    for i in range(LANES):
        number = I64(i)
        if last is not None:
            number = b.select(b.icmp_signed("<", number, last), number, last)
        one = scalar(b, b.add(address, b.mul(number, I64(width))), element)
        found = b.insert_element(found, one, I32(i))
    return found


def half_floats(b: Builder, raw: Value) -> Value:
    """float16 numbers."""
    return widen(b, F16_KIND, raw)


def half_power(b: Builder, raw: Value) -> Value:
    """e8m0 numbers of GGUF: 2^(e - 128)."""
    e = b.zext(raw, vector_of(I32))
    small = b.shl(splat(0x200000, e.type), b.and_(e, splat(1, e.type)))
    large = b.shl(b.sub(e, splat(1, e.type)), splat(23, e.type))
    bits = b.select(b.icmp_unsigned("<", e, splat(2, e.type)), small, large)
    return b.bitcast(bits, vector_of(F32))


def super_blocks(b: Builder, row: Row, width: int, emit: Callable[[Value, Value], None]) -> None:
    """emit(address of the block, int64 number of the block) for each 256 inputs."""
    with each(b, b.lshr(row.inputs, I64(8))) as (at, _):
        emit(at_byte(b, row.codes, b.mul(at, I64(width))), at)


def scales_and_minima(width: int) -> Any:
    """q4_k and q5_k: d, dmin and eight scales and minima of six bits; the minima are negated."""

    def prepare(b: Builder, row: Row) -> None:
        def emit(block: Value, number: Value) -> None:
            words = vector_of(I32, 4)
            head = b.load(b.inttoptr(block, words.as_pointer()), align=1)
            first, second = (
                b.shuffle_vector(head, head, constant(picks, I32))
                for picks in ((1, 3, 2, 3), (1, 1, 2, 2))
            )
            first = b.lshr(first, constant((0, 0, 0, 4), I32))
            first = b.and_(first, constant((0x3F3F3F3F, 0x0F0F0F0F) * 2, I32))
            second = b.lshr(second, splat(2, words))
            second = b.and_(second, constant((0, 0x30303030) * 2, I32))
            six = b.zext(b.bitcast(b.or_(first, second), vector_of(I8, 16)), vector_of(I32, 16))
            pair = b.fpext(scalar(b, block, vector_of(F16, 2)), vector_of(F32, 2))
            pair = b.fmul(pair, constant((1.0, -1.0)))
            wide = b.shuffle_vector(pair, pair, constant([0] * 8 + [1] * 8, I32))
            value = b.fmul(b.uitofp(six, vector_of(F32, 16)), wide)
            for i, target in enumerate((row.ready, row.minima)):
                half = constant(range(8 * i, 8 * i + 8), I32)
                half = b.shuffle_vector(value, value, half)
                if i == 0:
                    half = row.scaled(b, half, b.shl(number, I64(3)))
                store(b, half, at_byte(b, target, b.shl(number, I64(5))))

        super_blocks(b, row, width, emit)

    return prepare


def q6_scales(b: Builder, row: Row) -> None:
    """16 scales of eight bits times d."""

    def emit(block: Value, number: Value) -> None:
        scales = b.sitofp(bytes_at(b, at_byte(b, block, 192), True, 16), vector_of(F32, 16))
        d = broadcast(b, half_at(b, at_byte(b, block, 208)), 16)
        value = row.scaled(b, b.fmul(scales, d), b.shl(number, I64(4)))
        store(b, value, at_byte(b, row.ready, b.shl(number, I64(6))))

    super_blocks(b, row, 210, emit)
